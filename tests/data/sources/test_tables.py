"""Tables of numbers: what is read, and one line for what cannot be."""

import gzip

import numpy as np
import pytest

from tfx_jax.data.sources.tables import read_table
from tfx_jax.errors import UserError

HEADER = "id,HR,died,pH\n"


@pytest.fixture
def write(tmp_path):
    def write(text, name="stays.csv"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write


@pytest.mark.parametrize("name", ["stays.csv", "stays.csv.gz"])
def test_cells_are_numbers_or_nothing(write, name):
    """Quotes, blanks, a blank line, a comma within a cell that is not read, and DOS line ends."""
    path = write('id , HR,died,pH\r\n"a,b",61,0,\r\n\r\nc," 7.5e1 ",1.0,nan\r\nd,,0,7.4\r\n', name)
    columns, values, labels = read_table(path, label_column="died", exclude=["id"])
    assert columns == ("HR", "pH")
    np.testing.assert_array_equal(values, [[61, np.nan], [75, np.nan], [np.nan, 7.4]])
    assert values.dtype == np.float64
    assert labels.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "{path} is empty"),
        (
            HEADER + "a,1,0,1\nb," + "1" * 200_000 + ",0,1\n",
            f"{{path}}, line 3: column 'HR': '{'1' * 40}' is not finite",
        ),
        # A quotation mark that nothing closes would take the rows after it into its cell, which nothing reads.
        (HEADER + '"a,60,0,1\nb,60,0,1\n"c,60,0,1\nd,60,1,1\n', "{path}, line 2: ',' expected after '\"'"),
        ("HR,died,id\n" + '60,0,"a\n60,0,b\n60,1,c\n', "{path}, line 2: unexpected end of data"),
        (HEADER, "{path} has no rows, only a line of column names"),
        ("id,HR,pH\n1,2,3\n", "{path}, line 1: 0 columns named 'died'; there are id, HR, pH"),
        ("HR,died,pH\n2,0,3\n", "{path}, line 1: 0 columns named 'id'; there are HR, died, pH"),
        ("id,HR,died,HR\n1,2,0,3\n", "{path}, line 1: 2 columns named 'HR'; there are id, HR, died, HR"),
        ("id,died\n1,0\n", "{path}, line 1: no column is left besides the label and the excluded columns"),
        (HEADER + "1,60,0,7.4\n2,60,1\n", "{path}, line 3: 3 cells, but line 1 names 4 columns"),
        (
            HEADER + '"1\n",60,0,7.4\n2,fast,1,7.4\n',
            "{path}, line 4: column 'HR': 'fast' is not a number; exclude the column or encode it as numbers",
        ),
        (HEADER + "1,60,0,inf\n", "{path}, line 2: column 'pH': 'inf' is not finite"),
        (HEADER + "1,60,2,7.4\n", "{path}, line 2: column 'died': the label must be 0 or 1, got '2'"),
        (HEADER + "1,60,,7.4\n", "{path}, line 2: column 'died': the label must be 0 or 1, got ''"),
        (
            HEADER + "1,60,yes,7.4\n",
            "{path}, line 2: column 'died': 'yes' is not a number; exclude the column or encode it as numbers",
        ),
    ],
)
def test_a_mistake_costs_one_line_that_names_the_place(write, text, message):
    path = write(text)
    with pytest.raises(UserError) as caught:
        read_table(path, label_column="died", exclude=["id"])
    assert str(caught.value) == message.format(path=path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"missing\.csv does not exist"):
        read_table(tmp_path / "missing.csv", label_column="died")


@pytest.mark.data
def test_the_stays_of_intensive_care(shared_data):
    """As many rows, deaths, columns and numbers as the table is known to have."""
    for part, rows, deaths in (("train", 3600, 499), ("dev", 400, 55)):
        table = read_table(
            shared_data / "icu2012" / f"{part}.csv.gz",
            label_column="In-hospital_death",
            exclude=["recordid", "SAPS-I", "SOFA", "Length_of_stay", "Survival"],
        )
        assert (len(table.values), table.labels.sum(), len(table.columns)) == (rows, deaths, 114)
        assert (~np.isnan(table.values)).sum(axis=1).min() > 0


@pytest.mark.parametrize("name", ["", " ", "Unnamed: 0", '"\u200b"'])
@pytest.mark.parametrize("header", ["{},HR,died", "HR,{},died"])
def test_row_numbers_are_no_variable(write, name, header):
    path = write(f"{header.format(name)}\n0,1,0\n1,2,1\n")
    with pytest.raises(UserError, match=rf"line 1: column {1 + header.index('{') // 3} has no name"):
        read_table(path, label_column="died")
    if name.startswith("U"):
        assert read_table(path, label_column="died", exclude=[name]).columns == ("HR",)
