"""What the server keeps of one visitor while the page is open."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paligemma.view.examples import Example
from paligemma.view.models import ModelHost
from paligemma.view.picture import Picture
from paligemma.view.requests import uploaded_path
from paligemma.view.runs import History, Plan, Run


@dataclass
class RunControl:
    """What Stop and a run under way say to each other."""

    stop_asked: bool = False
    finished: bool = False


@dataclass
class Visit:
    """One visitor's runs, and what was asked for next. Copied for every visitor, all but the models.

    Attributes:
        hosts: the server's models, at least one.
        examples: those that the page offers.
        model: which of the models answers, by its place in the list.
        plan: what the next run shall do. A run takes it; one that finds none was overtaken, and does nothing.
        control: of the newest run.
        form: what picture and prompt the form had when the current run was asked for or came from a file.
        picture: the one on the page, once a model has seen it.
        example: the example on the page, if that is where its picture is from.
        num_downloads: so that the same file can be had twice.
        num_news: updates that the page was sent.
    """

    hosts: tuple[ModelHost, ...]
    examples: tuple[Example, ...] = ()
    history: History = field(default_factory=History)
    model: int = 0
    plan: Plan | None = None
    control: RunControl = field(default_factory=lambda: RunControl(finished=True))
    form: tuple[Any, ...] | None = None
    picture: Picture | None = None
    example: Path | None = None
    num_downloads: int = 0
    num_news: int = 0

    @property
    def host(self) -> ModelHost:
        return self.hosts[self.model]

    def host_of(self, run: Run) -> ModelHost | None:
        """The loaded model that made a run; None where it is not one of the server's."""
        return next((host for host in self.hosts if host.model and host.model_name == run.model["name"]), None)

    def ask(self, plan: Plan | None) -> None:
        """Line a run up, and end what still runs; None leaves everything as it is."""
        if plan is None:
            return
        self.control.stop_asked = True
        self.control = RunControl()
        self.plan = plan

    def asked_about(self, upload: Any) -> str | Path | Picture | None:
        """The picture of a request: the one on the page, which is the uploaded one unless it came otherwise."""
        return self.picture or self.example or uploaded_path(upload)

    def take_plan(self) -> Plan | None:
        plan, self.plan = self.plan, None
        return plan
