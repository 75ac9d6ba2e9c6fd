"""Chat templates of the forms that published models have, and conversations to render with them."""

TEMPLATES = {
    "im_start": (
        "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif %}"
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim "
        "+ '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "headers": """{{- bos_token }}
{%- set ns = namespace(system='', count=0) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start|>system<|end|>\\n\\n' + ns.system + '<|eot|>' }}
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant') %}
        {%- continue %}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{{- ns.count }}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
""",
    "instructions": (
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
        "{{ ' [INST] ' + message['content'] + ' [/INST]' }}{% else %}{% generation %}"
        "{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    ),
    "json": (
        "{% if tools is not none %}tools{% endif %}{% for message in messages %}\n"
        "  {% if loop.last and not add_generation_prompt %}{% break %}{% endif %}\n"
        "  {{ dict(message) | tojson }}\n  {{ message | tojson(indent=2, sort_keys=true) }}\n{% endfor %}"
        "{{ strftime_now('%Y') | length }}"
    ),
}

USER, ASSISTANT, SYSTEM = (
    {"role": "user", "content": " Grüße & <b>日本</b>\n"},
    {"role": "assistant", "content": 'Yes, "it\'s" {{ bos_token }}. '},
    {"role": "system", "content": "Be brief.\n\n"},
)
CONVERSATIONS = [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [SYSTEM, USER, ASSISTANT], [ASSISTANT, USER]]
