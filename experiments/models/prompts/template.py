"""What a role template is: named, versioned text with `{field}` slots, turned into token ids by a model."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Literal

from racelab.experiments.errors import ConfigError
from racelab.experiments.ports import LanguageModel

_SLOT = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, slots=True)
class RoleTemplate:
    """One role's prompt.

    Attributes:
        name: `<role>-<flavour>`.
        version: raised whenever the wording changes, so that runs can be told apart.
        user: the text; `{field}` slots are filled by `render`, other braces stay as they are.
        layout: `chat` puts the text into the model's chat template, `text` gives it as it stands.
        system: system message of a chat; None: the model's own default.
        stop: strings that end a sample of this role.
        examples: criteria that the few-shot examples show (a copy of them is no answer).
    """

    name: str
    version: int
    user: str
    layout: Literal["chat", "text"] = "chat"
    system: str | None = None
    stop: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()

    @property
    def sha(self) -> str:
        """First 12 hex digits of the SHA-256 of everything that reaches the model."""
        body = json.dumps([self.layout, self.system, self.user, self.stop], ensure_ascii=False)
        return hashlib.sha256(body.encode()).hexdigest()[:12]

    @property
    def slots(self) -> frozenset[str]:
        """Names of the fields that `render` needs."""
        return frozenset(_SLOT.findall(self.user))

    def render(self, **fields: str) -> str:
        """The user text with every slot filled. Filled-in text is never searched for slots.

        Raises:
            ConfigError: a slot without a value, or a value without a slot.
        """
        if fields.keys() != self.slots:
            raise ConfigError(
                f"template {self.name} has the slots {sorted(self.slots)} but was given {sorted(fields)}"
            )
        return _SLOT.sub(lambda found: fields[found.group(1)], self.user)

    def encode(self, model: LanguageModel, **fields: str) -> tuple[int, ...]:
        """Token ids of the rendered prompt, up to where the model's answer starts."""
        text = self.render(**fields)
        ids = model.chat(text, self.system) if self.layout == "chat" else model.encode(text)
        return tuple(ids)
