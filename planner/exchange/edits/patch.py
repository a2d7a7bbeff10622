"""A user's file with the values of another plan."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from hardware_profiles.errors import InputError
from planner.exchange.edits.changes import REMOVED, Changes, Editor, Parse, applied, edited
from planner.exchange.edits.json_text import edit_json
from planner.exchange.edits.python_text import edit_python
from planner.exchange.edits.shell_text import edit_shell, with_exports
from planner.exchange.edits.toml_text import edit_toml
from planner.exchange.edits.yaml_text import edit_yaml
from planner.exchange.job import FOLLOWING, Job
from planner.exchange.keys import MISSING, Source, leaves_of, lookup, placed, reads_nothing
from planner.exchange.syntax.documents import OWN_KEY, STATED, STATED_IN_JSON, syntax_of
from planner.exchange.syntax.flags import LAUNCHER
from planner.exchange.target import Target

EDITORS: Final[Mapping[str, Editor]] = {
    "json": edit_json,
    "python": edit_python,
    "shell": edit_shell,
    "toml": edit_toml,
    "yaml": edit_yaml,
}


@dataclass(frozen=True)
class Patch:
    """A changed file."""

    before: str
    after: str
    elsewhere: Mapping[str, tuple[Any, str]] = field(default_factory=dict)  # what else to set

    def diff(self, name: str) -> str:
        """Return the unified diff of the file."""
        old, new = (text.splitlines(keepends=True) for text in (self.before, self.after))
        lines = difflib.unified_diff(old, new, name, name)
        return "".join(one if one.endswith("\n") else f"{one}\n" for one in lines)

    @property
    def changed_lines(self) -> int:
        """Lines that are removed or added."""
        lines = self.diff("file").splitlines()[2:]
        return sum(line[:1] in "+-" for line in lines)


@dataclass(frozen=True)
class PatchedFile:
    """A file that is to state another plan.

    ``old``: the plan that it states now, with the parts that it leaves open.
    """

    target: Target
    text: str
    where: str
    folder: Path | None
    old: Job

    def patch(self, new: Job) -> Patch:
        """Return the file with the values of a plan, read back and compared.

        What an exported file would have in another way for the new plan than for the old one is
        changed; where the file still states something else, values and keys follow that are in the
        way, as few as it takes.
        """
        parse = self._parse
        raw = parse(self.text)
        goal = _Goal(self, raw, new)
        changes = goal.changes()
        text = edited(self.text, changes, EDITORS[syntax_of(self.text)], parse)
        text = self._restated(text, new)
        missing = goal.missing(parse(text))
        if missing:
            raise InputError(f"{self.where}: the changed file would not state {missing[0]}")
        return Patch(self.text, text, self._elsewhere(new))

    @property
    def _parse(self) -> Parse:
        parse = partial(_parsed, self.target, self.where)
        return with_exports(parse) if syntax_of(self.text) == "shell" else parse

    def _elsewhere(self, new: Job) -> dict[str, tuple[Any, str]]:
        """Return the options that change and that no key carries."""
        return {
            name: (value, place)
            for name, (value, place) in self.target.not_carried(new).items()
            if self.old.settings.get(name) != value and name not in FOLLOWING
        }

    def _restated(self, text: str, new: Job) -> str:
        """Return a text whose header, if it is one of ours, has the options that no key carries."""
        if not self.target.syntax.stated(self.text):
            return text
        lines = self.target.header(new, "").stated()
        if syntax_of(self.text) == "json":
            own = {name: value for name, (value, _) in self.target.not_carried(new).items()}
            places = {name: where for name, (_, where) in self.target.not_carried(new).items()}
            changes = {f"{OWN_KEY}.{STATED_IN_JSON}": own, f"{OWN_KEY}.set_them_in": places}
            return edited(text, changes, edit_json, partial(_json, self.where))
        found = text.splitlines(keepends=True)
        at = [n for n, line in enumerate(found) if STATED.fullmatch(line.rstrip("\n"))]
        kept = [line for n, line in enumerate(found) if n not in at]
        header = [f"#   {line}\n" for line in lines]
        return "".join([*kept[: at[0]], *header, *kept[at[0] :]])


class _Goal:
    """The options that a changed document must state."""

    def __init__(self, file: PatchedFile, raw: Mapping[str, Any], new: Job):
        self.file, self.raw, self.target = file, raw, file.target
        self.leaves = self._leaves(self.target.leaves(new))
        try:
            before = self.target.leaves(file.old)
        except InputError:  # a plan that the target reads and does not write
            before = {}
        self.before = self._leaves(before)
        stated = self.target.read_document(Source(placed(self.target.leaves(new)))).settings
        left = set(self.target.not_carried(new)) | set(FOLLOWING) - {"num_microbatches"}
        left |= self._automatic()
        self.options = {name: value for name, value in stated.items() if name not in left}
        open_ = {
            name
            for name in self.options
            if name not in self._read(raw)
            and file.old.settings.get(name, MISSING) == new.settings.get(name, MISSING)
        }
        for name in open_:
            del self.options[name]
        old = file.old.settings
        self.changing = {n for n, v in self.options.items() if n in old and old[n] != v}
        if self._read(raw).get("software") != self.options.get("software"):
            self.changing |= {"software", "zero_stage", "offload"}  # another engine

    def _leaves(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values as the document states them, those of nested mappings one by one."""
        found = dict(leaves_of(placed(self.target.restate(values, self.raw))))
        if syntax_of(self.file.text) == "shell" and self.target.syntax.name != "shell":
            return _as_flags(found)
        return found

    def _read(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        plain = {name: value for name, value in document.items() if name != OWN_KEY}
        return self.target.read_document(Source(plain, self.file.folder)).settings

    def _automatic(self) -> set[str]:
        """Return the options whose keys are ``auto``, which another file gives."""
        given = [key for key in self.target.keys if lookup(self.raw, key.path) == "auto"]
        return {name for key in given for name in key.carries}

    def missing(self, document: Mapping[str, Any]) -> list[str]:
        """Return the options that a document does not state so."""
        found = dict(self._read(document))
        if "global_batch_size" in found:  # the micro-batches follow
            found.setdefault("num_microbatches", self.options.get("num_microbatches"))
        return [f"{n} = {v}" for n, v in self.options.items() if found.get(n, MISSING) != v]

    def reached(self, document: Mapping[str, Any]) -> bool:
        """Whether a document states all options."""
        return not self.missing(document)

    def _open(self, changes: Changes) -> dict[str, Any]:
        """Return the changes that change something, and nothing that is automatic."""
        found = {}
        for path, value in changes.items():
            now = lookup(self.raw, path)
            if now is (MISSING if value is REMOVED else value) or (
                now == "auto" and value is not REMOVED
            ):
                continue
            if not _same(now, value):
                found[path] = value
        return found

    def differences(self) -> dict[str, Any]:
        """Return what the new plan's file has in another way than the old plan's."""
        changes = {path: REMOVED for path in self.before if path not in self.leaves}
        for path, value in self.leaves.items():
            if path not in self.before or self.before[path] != value or self._is_size(path):
                changes[path] = value
        return self._open(changes)

    def _is_size(self, path: str) -> bool:
        """Whether a key counts the processes or the nodes, for which the file has another number.

        Not the launcher's: a script often leaves them to the machine.
        """
        cluster, now = self.file.old.cluster, lookup(self.raw, path)
        sizes = (cluster.num_gpus, cluster.num_nodes, cluster.gpus_per_node)
        if (
            path not in self.leaves
            or type(now) is not int
            or now < 1
            or path.split(".")[0] == LAUNCHER
        ):
            return False
        plain = any(key.path == path and key.read is reads_nothing for key in self.target.keys)
        return plain and type(self.leaves[path]) is int and self.leaves[path] in sizes

    def changes(self) -> dict[str, Any]:
        """Return changes after which a document states all options, as few as it takes.

        A difference between the two plans' files stays, unless the user states the old value in
        another way than we (a degree that is automatic).
        """
        first = self.differences()
        every = dict(first)
        if not self.reached(applied(self.raw, every)):
            every |= {**self._open(self.leaves), **dict(self._in_the_way())}
        if missing := self.missing(applied(self.raw, every)):
            raise InputError(
                f"{self.file.where}: its keys cannot state {missing[0]}; "
                f"shardplan export writes a new file for {self.target.name}"
            )
        kept = {path for path in first if not self._states_otherwise(path)}
        kept |= {path for path in every if self._contradicts(path) or self._is_size(path)}
        for path in sorted(every, key=lambda one: (every[one] is not REMOVED, one.count("."))):
            if path in kept:
                continue
            fewer = {name: value for name, value in every.items() if name != path}
            if self.reached(applied(self.raw, fewer)):
                every = fewer
        return self._without_doubles(self._with_whole_sections(every))

    def _with_whole_sections(self, changes: Changes) -> dict[str, Any]:
        """Return changes with all values of the sections that the document does not have."""
        found = dict(changes)
        for path, value in changes.items():
            section = path.rpartition(".")[0]
            if not section or value is REMOVED or isinstance(lookup(self.raw, section), Mapping):
                continue
            inside = {k: v for k, v in self.leaves.items() if k.startswith(f"{section}.")}
            found |= {k: v for k, v in inside.items() if k not in found}  # after removals
        return found

    def _without_doubles(self, changes: Changes) -> dict[str, Any]:
        """Return changes that use the user's keys for what new keys would state a second time."""
        found = dict(changes)
        added = [one for one in changes if lookup(self.raw, one) is MISSING]
        others = [path for path, _ in self._in_the_way(changed=True) if path not in changes]
        for path in others:
            for new in added:
                fewer = {name: value for name, value in found.items() if name != new}
                if type(changes[new]) is not type(lookup(self.raw, path)) or new not in found:
                    continue
                other = {**fewer, path: changes[new]}
                needed = not self.reached(applied(self.raw, fewer))
                if needed and self.reached(applied(self.raw, other)):
                    found = other
                    break
            else:
                without = {**found, path: REMOVED}
                if self.reached(applied(self.raw, without)):
                    found = without
        return found

    def _contradicts(self, path: str) -> bool:
        """Whether a key that the new plan's file has states an option that changes otherwise."""
        now = lookup(self.raw, path)
        if path not in self.leaves or now in (MISSING, "auto"):
            return False
        carried = {name for key in self.target.keys if key.path == path for name in key.carries}
        return bool(carried & self.changing - set(FOLLOWING))

    def _states_otherwise(self, path: str) -> bool:
        """Whether a value of the old plan's file is another one in the user's file."""
        return path in self.before and not _same(lookup(self.raw, path), self.before[path])

    def _in_the_way(self, *, changed: bool = False) -> Iterator[tuple[str, Any]]:
        """Yield the keys and sections without which the document states other options.

        ``changed``: only options that are others in the new plan.
        """
        options = self.changing if changed else set(self.options)
        stated = self._read(self.raw)
        for path in _paths(self.raw):
            inside = path in self.leaves or any(one.startswith(f"{path}.") for one in self.leaves)
            if inside or path.split(".")[0] == OWN_KEY:
                continue
            without = self._read(applied(self.raw, {path: REMOVED}))
            if any(stated.get(name) != without.get(name) for name in options):
                yield path, REMOVED


def _as_flags(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as flags of a program whose own files are documents.

    No space follows a colon, which would look like YAML.

    >>> _as_flags({"a": True, "b.c": 1, "b.d.e": False})
    {'a': 'True', 'b': '{"c":1, "d":{"e":false}}'}
    """
    found = {}
    for name, value in placed(leaves).items():
        nested = isinstance(value, Mapping)
        found[name] = (
            json.dumps(value, separators=(", ", ":"))
            if nested
            else str(value)
            if isinstance(value, bool)
            else value
        )
    return found


def _same(one: Any, other: Any) -> bool:
    """Whether values are equal; True is not 1."""
    return bool(one == other) and isinstance(one, bool) is isinstance(other, bool)


def _paths(document: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Yield the paths of all keys, of mappings too."""
    for name, value in document.items():
        yield f"{before}{name}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{before}{name}.")


def _parsed(target: Target, where: str, text: str) -> Mapping[str, Any]:
    return target.syntax.parse(text, where)


def _json(where: str, text: str) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = json.loads(text)
    except ValueError as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    return found
