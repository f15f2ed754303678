"""How a compiled model stands, as its node says it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import torch

from ...common.reason import Reason
from ...common.words import Words, join
from ...runtime.network_wrapper import NetworkWrapper
from .low_rank import LowRankBranches
from .other_devices import OtherDevices, lines_of
from .request import Request
from .texts import branches_line, capture_line, counts_text, slower_line, status_text, uncompiled_line, with_measured

log = logging.getLogger(__name__)


class Status:
    """Tells a person how a compiled model stands. Holds neither the model nor its wrappers."""

    def __init__(self, request: Request, notices: Sequence[Words], samples: bool, of: Status | None = None) -> None:
        """`samples` says that calls of the network are steps of a sampling. `of` is that of the model copied."""
        self.of = of
        self.refused: Sequence[str] = ()
        """Why graphs of a file cannot serve here."""
        self.branches: LowRankBranches | None = None
        """What runs LoRAs beside quantised weights, if somebody asked for that."""
        self.copies: dict[torch.device, Status] = {}
        """How the copies on other devices stand."""
        self.others: OtherDevices | None = None
        self._request = request
        self._notices = notices
        self._samples = samples
        self._told = ""
        self._workflow = request.workflow()
        self._wrappers: list[weakref.ref[NetworkWrapper]] = []

    def add(self, wrapper: NetworkWrapper) -> None:
        """Tell of this wrapper's model from now on."""
        self._wrappers.append(weakref.ref(wrapper))

    def text(self) -> str:
        """Return how things stand now; nothing once the model is gone."""
        wrapper = next(iter(self._alive()), None)
        if wrapper is None:
            return ""
        compiled, trial = wrapper.compiled, wrapper.speed_trial
        is_busy = compiled.background is not None and compiled.background.is_busy
        summary = compiled.summary() if trial is None else with_measured(compiled.summary(), trial)
        stands = status_text(summary, self._request.source, is_busy, self._samples)
        steps = slower_line(trial) or next((line for each in self._alive() if (line := capture_line(each))), "")
        beside = [lines_of(text, device) for device, each in self.copies.items() if (text := each.text())]
        beside += self.others.lines() if self.others else []
        self._told = join([stands, *self.refused, steps, branches_line(self.branches), *self._notices, *beside])
        return self._told

    def counts(self) -> str:
        """Return how things stand now, for the log."""
        return next((counts_text(wrapper.compiled.summary()) for wrapper in self._alive()), "")

    def _alive(self) -> list[NetworkWrapper]:
        return [found for reference in self._wrappers if (found := reference()) is not None]

    def tell(self, line: str = "") -> None:
        """Tell how things stand now, and this besides."""
        if self.of is not None:
            self.of.tell(line)
        elif text := self.text():
            log.info("Node %s: %s", self._request.node_id, self.counts())
            self._request.on_change(join([text, line]))

    def tell_broken(self, reason: Reason) -> None:
        """Tell why something was made again uncompiled."""
        self.tell(uncompiled_line(reason, ""))

    def tell_news(self) -> None:
        """Tell how things stand now if that is news, or if another workflow runs the model than before."""
        if self.of is not None:
            self.of.tell_news()
            return
        before = self._told, self._workflow
        self._workflow = self._request.workflow()
        if (self.text(), self._workflow) != before:
            self.tell()
