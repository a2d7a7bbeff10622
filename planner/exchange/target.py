"""A target: the trainer that a file is written for, and the reading of its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

from cost_models.legality.capabilities import ONLY_WITH
from cost_models.plan.plan import Plan
from hardware_profiles.errors import InputError
from hardware_profiles.fields import read_text
from hardware_profiles.message import on_one_line
from planner.exchange.job import FOLLOWING, Job, is_default
from planner.exchange.keys import (
    MISSING,
    OMIT,
    Key,
    Source,
    UnknownWord,
    lookup,
    placed,
    unknown_paths,
)
from planner.exchange.syntax.documents import OWN_KEY, FileHeader, Syntax, stated_in_comments

# where a training script states what only PEFT and bitsandbytes read
ADAPTERS_IN_SCRIPT: Final = {
    "lora": "peft.LoraConfig(r=…)",
    "qlora": "peft.LoraConfig(r=…) and BitsAndBytesConfig(load_in_4bit=True)",
    "lora_alpha": "peft.LoraConfig(lora_alpha=…)",
    "lora_targets": "peft.LoraConfig(target_modules=…)",
    "quantisation": "transformers.BitsAndBytesConfig",
}


@dataclass(frozen=True)
class ConfigReading:
    """The options that a file states, and what was not understood."""

    target: str
    settings: Mapping[str, Any]  # options of ``fit``
    unknown: tuple[str, ...] = ()  # keys that no version looked at has
    notes: tuple[str, ...] = ()  # values without a counterpart here
    model: str | None = None  # as the file names it
    # config.json of the model that the file describes, without vocab_size where it does not say
    config: Mapping[str, Any] | None = None
    processes: int | None = None  # that the file starts, in all


# of readers that meet a value of another type than a trainer's file has
MISREAD: Final = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The file of one trainer.

    ``elsewhere``: for each option that no key carries, where a user sets it. ``recognises``:
    whether a parsed document is such a file. ``launch``: the command that starts the job.
    ``more_files``: further files by name; ``companion``: the one of them whose comments are the
    header, where the file itself cannot hold one. ``prepare``: the document with files that it
    names put in. ``complete``: options that follow from several keys, where no single one states
    them.
    ``check`` raises an InputError for a written document that breaks the target's arithmetic.
    ``model``: the path of the key that names the model. ``values``: the values of all keys at once,
    by path, where the keys write none. ``processes``: paths whose numbers, multiplied, are the
    processes that the file starts; all but the first may be absent. ``remarks``: what a document
    states beyond the keys that is not priced. ``model_name``: the model's name where no single key
    has it; ``model_config``: the config.json of a model that the document describes by its sizes.
    ``restate``: values by path as a document states them that has other keys for them.
    """

    name: str
    file: str
    syntax: Syntax
    keys: tuple[Key, ...]
    elsewhere: Mapping[str, str]
    recognises: Callable[[Mapping[str, Any]], bool]
    launch: Callable[[Job], str]
    more_files: Callable[[Job, FileHeader], Mapping[str, str]] = lambda job, header: {}
    companion: str | None = None
    prepare: Callable[[Source], Mapping[str, Any]] = lambda source: source.document
    complete: Callable[[dict[str, Any], Source], Mapping[str, Any]] = lambda settings, source: {}
    check: Callable[[Mapping[str, Any], Job], None] = lambda document, job: None
    model: str | None = None
    values: Callable[[Job], Mapping[str, Any]] | None = None
    processes: tuple[str, ...] = ()
    remarks: Callable[[Source], Sequence[str]] = lambda source: ()
    model_name: Callable[[Source], str | None] = lambda source: None
    model_config: Callable[[Source], Mapping[str, Any] | None] = lambda source: None
    restate: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] = (
        lambda leaves, document: leaves
    )

    def leaves(self, job: Job) -> dict[str, Any]:
        """Return the values by path that state a job."""
        if self.values is not None:
            return dict(self.values(job))
        written = ((key.path, key.write(job)) for key in self.keys)
        return {path: value for path, value in written if value is not OMIT}

    def not_carried(self, job: Job) -> dict[str, tuple[Any, str]]:
        """Return the options that the keys do not carry: value, and where to set it."""
        read = self.read_document(Source(placed(self.leaves(job)))).settings
        left = {
            name: value
            for name, value in job.settings.items()
            if read.get(name) != value and not (name not in read and is_default(name, value))
        }
        unplaced = [name for name in left if name not in self.elsewhere]
        if unplaced:
            name = unplaced[0]
            raise InputError(f"{self.name} cannot express {name} = {left[name]}")
        return {name: (value, self.elsewhere[name]) for name, value in left.items()}

    def write(self, job: Job, version: str) -> dict[str, str]:
        """Return the texts of the files, by name; the first one is the target's own."""
        leaves = self.leaves(job)
        self.check(placed(leaves), job)
        carried = {key.path: ", ".join(key.carries) for key in self.keys if key.carries}
        header = self.header(job, version)
        text = self.syntax.render(leaves, carried, header)
        return {self.file: text, **self.more_files(job, header)}

    def header(self, job: Job, version: str) -> FileHeader:
        """Return the header of the file."""
        question = on_one_line(f"{job.model.name} on {job.cluster.name}")
        return FileHeader(self.name, version, question, self.launch(job), self.not_carried(job))

    def read(self, text: str, where: str, folder: Path | None = None) -> ConfigReading:
        """Return what a file of the target states."""
        source = Source(self.syntax.parse(text, where), folder)
        found = self.read_document(source)
        settings = {**found.settings, **self.syntax.stated(text), **self._stated_next_to(folder)}
        return replace(found, settings=settings)

    def _stated_next_to(self, folder: Path | None) -> dict[str, Any]:
        """Return the options in the header of the companion, if it lies next to the file."""
        if self.companion is None or folder is None or not (folder / self.companion).is_file():
            return {}
        return stated_in_comments(read_text(folder / self.companion, "a script"))

    def read_document(self, source: Source) -> ConfigReading:
        """Return what a parsed document states.

        Keys that are there come first, in the order of ``keys``; then those that are not state
        what ``absent`` says. A value ``auto`` or null states nothing. Parts of a plan that the
        target cannot change have their defaults; those that are set elsewhere stay open.
        """
        source = Source(self.prepare(source), source.folder)
        document = {name: value for name, value in source.document.items() if name != OWN_KEY}
        settings: dict[str, Any] = {}
        notes: list[str] = []
        present = {key.path: lookup(document, key.path) for key in self.keys}
        for key in self.keys:
            value = present[key.path]
            if value is MISSING or value is None or value == "auto":
                continue
            try:
                settings.update(key.read(value, source))
            except UnknownWord as error:
                notes.append(str(error))
            except MISREAD:
                notes.append(f"{key.path} = {str(value)[:60]!r} is not understood")
        for key in self.keys:
            if present[key.path] is MISSING:
                for name, value in key.absent.items():
                    settings.setdefault(name, value)
        try:
            settings = {**self.complete(settings, source), **settings}
        except UnknownWord as error:
            notes.append(str(error))
        except MISREAD:
            notes.append("the values of the file do not fit together: only single ones were read")
        try:
            notes += self.remarks(source)
        except MISREAD:
            notes.append("what the file states and is not priced cannot be told")
        settings = {**self._without_keys(settings), **settings}
        unknown = tuple(unknown_paths(self.keys, document))
        model = self.model_name(source) if self.model is None else source.get(self.model)
        return ConfigReading(
            self.name,
            settings,
            unknown,
            tuple(dict.fromkeys(notes)),
            model if isinstance(model, str) else None,
            self.model_config(source),
            self._processes(source),
        )

    def _processes(self, source: Source) -> int | None:
        """Return the processes that a document starts; None where it does not say."""
        if not self.processes:
            return None
        first, *others = self.processes
        found = [source.get(first), *(source.get(path, 1) for path in others)]
        counts = [len(one) if isinstance(one, list) else one for one in found]
        return prod(counts) if all(type(n) is int and n > 0 for n in counts) else None

    def _without_keys(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults of the parts of a plan that neither a key nor a user sets."""
        carried = {name for key in self.keys for name in key.carries}
        never = carried | set(self.elsewhere) | set(FOLLOWING)
        return {
            name: value
            for name, value in Plan().to_dict().items()
            if name not in never and settings.get(ONLY_WITH.get(name, ""), 2) > 1
        }
