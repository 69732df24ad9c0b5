"""One RLDS training step (Algorithm 1), for every condition: what differs between them are values of the config.

Deviations from the paper and choices where it is silent stand where they are made: rollout.py (who is retried), sdae.py
(fallbacks), auxiliary.py (pairs), batch.py (contexts), diagnostics.py (pooling). Here:
  * one task a run: the maths shares sigma_batch between several (§3.3), but no configuration mixes them;
  * all three conditions see the same instances in the same order for one seed;
  * rows with an advantage of 0 stay in the batch: they take part in KL and entropy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from racelab.configs.schema_rlds import RldsMethodConfig, RldsRunConfig
from racelab.experiments.episodes import AgentSampling
from racelab.experiments.methods.records import Clock
from racelab.experiments.methods.rlds import records
from racelab.experiments.methods.rlds.arrays import arrays
from racelab.experiments.methods.rlds.batch import pairs, token_batch
from racelab.experiments.methods.rlds.diagnostics import null, retry_deltas, stage_metrics
from racelab.experiments.methods.rlds.parts import RldsParts
from racelab.experiments.methods.rlds.phi import DynamicPhi, update
from racelab.experiments.methods.rlds.rollout import Rollout, play
from racelab.experiments.methods.rlds.sdae import Settings, turn_advantages
from racelab.experiments.methods.rlds.turns import loss_weights
from racelab.experiments.rng import numpy_generator
from racelab.experiments.types import StepRecord


@dataclass(frozen=True, slots=True)
class RldsState:
    """Everything that an RLDS run carries from one step to the next, beside weights, optimiser and random streams.

    Attributes:
        step: updates done.
        phi: subtask weights; the static ones unless `sdae.phi_eta` is above 0.
        memory: the last suggestions, oldest first; empty unless `reflect.memory` is above 0.
    """

    step: int
    phi: DynamicPhi
    memory: tuple[str, ...] = ()

    def state(self) -> dict[str, Any]:
        """JSON values; floats survive exactly."""
        return {"step": self.step, "phi": self.phi.state(), "memory": list(self.memory)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RldsState:
        """Undoes `state`."""
        return cls(int(state["step"]), DynamicPhi.from_state(state["phi"]), tuple(state["memory"]))


class Rlds:
    """RLDS and what it is compared with; a `Method` of the loop."""

    def __init__(self, config: RldsRunConfig, parts: RldsParts) -> None:
        """Keeps the parts."""
        self.run, self.config, self.parts = config, config.method, parts
        self.settings = sdae_settings(config.method)
        self.budget = config.budget

    def start(self) -> RldsState:
        """The state before the first step."""
        weights = tuple(subtask.weight for subtask in self.parts.task.subtasks)
        sdae = self.config.sdae
        return RldsState(0, DynamicPhi(weights, sdae.phi_prior, sdae.phi_eta))

    def load(self, state: Mapping[str, Any]) -> RldsState:
        """The state of a checkpoint."""
        return RldsState.from_state(state)

    def done(self, state: RldsState) -> bool:
        """True once the budget is used up."""
        return state.step >= self.budget

    def finish(self, state: RldsState, reason: str) -> list[dict[str, object]]:
        """RLDS has no phases."""
        return []

    def step(self, state: RldsState) -> tuple[RldsState, StepRecord]:
        """Rollouts, SDAE, one update."""
        config, task, step = self.config, self.run.task, state.step + 1
        clock, cpu = Clock(), time.process_time()
        instances = self.parts.stream.take(task.prompts_per_step)
        sampling = AgentSampling(task.temperature, task.top_p)
        rollout = play(config, self.parts, instances, sampling, state.memory, clock)  # lines 2-6
        seen = arrays(rollout, state.phi.weights_K, config.mask_prefix)
        (adv,) = turn_advantages([seen.rows], self.settings)  # lines 9-12
        (weights_NU,) = loss_weights([seen.rows.counts_NU], [seen.rows.train_from_N], config.loss_aggregation)
        kept = pairs(rollout.rows, seen.parent_N.tolist(), config.auxiliary)
        batch = token_batch(rollout.rows, adv.adv_NU, weights_NU, kept, config.auxiliary, task.temperature)
        clock.lap("advantage_s")
        stats = self.parts.backend.update(batch)  # line 14
        clock.lap("train_s")
        spent = records.Spent(clock.total(), time.process_time() - cpu)  # what follows only looks at the step
        after = self._after(state, rollout, retry_deltas(seen.rows, seen.parent_N))
        record = records.record(
            records.Seen(self.run, self.parts.task, rollout, seen, adv, kept, state.phi),
            step=step,
            stats=stats,
            diagnosed=self._diagnose(seen.rows, step),
            spent=spent,
        )
        return after, record

    def _after(self, state: RldsState, rollout: Rollout, deltas_RK: Any) -> RldsState:
        """The next state: φ sees the grade changes of the retries, the memory their suggestions."""
        said = tuple(r.addition for r in rollout.reflections if r.addition)
        size = self.config.reflect.memory
        memory = (*state.memory, *said)[-size:] if size else ()
        return RldsState(state.step + 1, update(state.phi, deltas_RK), memory)

    def _diagnose(self, rows: Any, step: int) -> dict[str, float]:
        """Stage metrics where there are grades, and now and then their permutation null."""
        if rows.grades_NK is None:
            return {}
        sdae = self.config.sdae
        found = stage_metrics([rows], self.settings)
        if sdae.null_draws and step % sdae.null_every == 0:
            rng = numpy_generator(self.parts.seed, "rlds-null", step)
            found |= {f"null/{k}": v for k, v in null([rows], self.settings, sdae.null_draws, rng).items()}
        return found


def sdae_settings(config: RldsMethodConfig) -> Settings:
    """The config's values as the maths takes them."""
    sdae = config.sdae
    return Settings(
        advantage=config.advantage,
        kernel=sdae.kernel,
        kernel_sigma=sdae.kernel_sigma,
        eps=sdae.eps,
        advantage_eps=config.advantage_eps,
        skip_flat=sdae.skip_flat,
        opmd_baseline=config.opmd_baseline,
        positive_amplification=config.positive_amplification,
    )
