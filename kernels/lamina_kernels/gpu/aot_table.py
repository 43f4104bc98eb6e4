"""The committed table of what kernels cost, and what counts as worse."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lamina_kernels.gpu.aot_code import Entry
from lamina_kernels.gpu.aot_targets import TARGETS
from lamina_kernels.gpu.compile_case import CompileCase

__all__ = ["Key", "Table", "Toolchain", "breaches", "worsened"]

_VECTOR = 16  # bytes: the widest load that every target has
_GRANULE = 8  # registers: hardware gives them out in eights, so 33 cost as much as 40
_RISE = 1.10

Key = tuple[str, str]  # case, target
Toolchain = dict[str, str]  # target: what compiled for it, with versions


@dataclass(slots=True)
class Table:
    toolchain: Toolchain = field(default_factory=dict)
    entries: dict[Key, Entry] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Table:
        """Raises ValueError, with the path, for a file that is no such table."""
        try:
            raw = json.loads(path.read_text())
            entries = {
                (case, target): Entry(**{**values, "tensor_cores": tuple(values["tensor_cores"])})
                for case, targets in raw["cases"].items()
                for target, values in targets.items()
            }
            return cls(dict(raw["toolchain"]), entries)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is no table of compiled kernels ({error}); delete it and use --update") from error

    def save(self, path: Path) -> None:
        """Sorted, one line per case and target, so that a diff shows what changed."""
        blocks = []
        for case in sorted({case for case, _ in self.entries}):
            lines = [
                f"      {json.dumps(target)}: {json.dumps(dataclasses.asdict(self.entries[case, target]))}"
                for target in TARGETS
                if (case, target) in self.entries
            ]
            blocks.append(f"    {json.dumps(case)}: {{\n" + ",\n".join(lines) + "\n    }")
        toolchain = json.dumps(self.toolchain, sort_keys=True)
        path.write_text(f'{{\n  "toolchain": {toolchain},\n  "cases": {{\n' + ",\n".join(blocks) + "\n  }\n}\n")

    def update(self, every: Collection[str], entries: Mapping[Key, Entry], toolchain: Toolchain) -> None:
        """Takes over what was compiled now; forgets cases that no module has any more."""
        self.entries = {key: entry for key, entry in self.entries.items() if key[0] in every} | dict(entries)
        self.toolchain |= toolchain

    def unchanged(self, sources: Mapping[str, str], toolchain: Toolchain) -> dict[Key, Entry]:
        """What compiling again would only repeat: made by these tools from these sources (case: fingerprint)."""
        return {
            (case, target): entry
            for (case, target), entry in self.entries.items()
            if sources.get(case) == entry.source and self.toolchain.get(target) == toolchain.get(target)
        }

    def differences(self, every: Collection[str], entries: Mapping[Key, Entry], toolchain: Toolchain) -> list[str]:
        """What is worse than in this table, and where the table and the modules' cases (`every`) disagree."""
        update = "run with --update and commit the table"
        found = [f"{case} on {target} is not in the table: {update}" for case, target in entries.keys() - self.entries]
        gone = {case for case, _ in self.entries} - set(every)
        found += [f"{case} is in the table, but no module has it any more: {update}" for case in gone]
        for (case, target), entry in entries.items():
            if (case, target) in self.entries and self.toolchain.get(target) == toolchain[target]:
                found += [f"{case} on {target}: {what}" for what in worsened(self.entries[case, target], entry)]
        return sorted(found)

    def strangers(self, toolchain: Toolchain) -> list[str]:
        """A sentence for each target whose part of the table another compiler made."""
        return [
            f"the table's part for {target} was made by {self.toolchain[target]}, this is {tools}"
            for target, tools in toolchain.items()
            if self.toolchain.get(target, tools) != tools
        ]


def breaches(case: CompileCase, target: str, entry: Entry) -> list[str]:
    """What no table can allow."""
    chip = TARGETS[target]
    found = []
    if entry.spill_bytes:
        found.append(f"spills {entry.spill_bytes} bytes a thread")
    if entry.shared_bytes > chip.shared_bytes:
        found.append(f"needs {entry.shared_bytes} bytes of shared memory, the chip has {chip.shared_bytes}")
    if entry.tensor_memory_columns > chip.tensor_memory_columns:
        found.append(
            f"needs {entry.tensor_memory_columns} columns of tensor memory, the chip has {chip.tensor_memory_columns}"
        )
    if case.tensor_cores and not entry.tensor_cores:
        found.append("has no tensor-core instructions")
    if case.vector_loads and entry.load_bytes < _VECTOR:
        found.append(f"loads at most {entry.load_bytes} bytes at once, not {_VECTOR}")
    if any(re.search("tf32$", family, re.IGNORECASE) for family in entry.tensor_cores):
        found.append('multiplies in TF32 (10 bits of fraction): its dot needs input_precision="ieee"')
    return found


def worsened(old: Entry, new: Entry) -> list[str]:
    """What became worse against the table, of that which `breaches` leaves open. Same toolchain on both sides."""
    found = []
    if _granules(new.registers) > _granules(old.registers) * _RISE:
        found.append(f"registers {old.registers} -> {new.registers}")
    if new.scalar_spills > old.scalar_spills * _RISE:
        found.append(f"scalar registers kept in lanes {old.scalar_spills} -> {new.scalar_spills}")
    if lost := [family for family in old.tensor_cores if family not in new.tensor_cores]:
        found.append(f"tensor-core instructions {_list(old.tensor_cores)} -> {_list(new.tensor_cores)}: no {lost[0]}")
    if new.load_bytes < min(old.load_bytes, _VECTOR):
        found.append(f"widest load {old.load_bytes} -> {new.load_bytes} bytes")
    return found


def _granules(registers: int) -> int:
    return -(-registers // _GRANULE)


def _list(families: tuple[str, ...]) -> str:
    return "+".join(families) or "none"
