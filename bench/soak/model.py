"""The soak's model: tiny and random, so that much happens in a short time, with a chat template."""

from __future__ import annotations

from pathlib import Path

from bench.tiny_models import SPECIAL_TOKENS, save_tiny_model

NAME = "tiny"
_END, _START = SPECIAL_TOKENS
_TEMPLATE = f"""\
{{%- for message in messages %}}{{{{ '{_START}' + message.role + '\\n' + message.content + '{_END}' }}}}{{% endfor %}}
{{%- if add_generation_prompt %}}{{{{ '{_START}assistant\\n' }}}}{{% endif %}}
"""


def save_soak_model(folder: Path) -> Path:
    """Write it into ``folder`` and return that."""
    # Peaked enough that texts repeat themselves, which is what drafts live on.
    save_tiny_model("llama", folder, initializer_range=0.3, num_hidden_layers=2)
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return folder
