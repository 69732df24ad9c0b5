"""Role templates: one per role (RACE App. B.1 names roles, not wording; the wording here is ours)."""

from racelab.experiments.models.prompts.template import RoleTemplate
from racelab.experiments.models.prompts.templates import TEMPLATES, get_template

__all__ = ["TEMPLATES", "RoleTemplate", "get_template"]
