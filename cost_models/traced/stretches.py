"""Which blocks of a traced module are gathered, reduced and at work in each stretch of its passes.

Nothing here depends on a plan: FSDP2 gathers a block before its forward pass, and reduces its
gradients at the end of its last backward pass; what lies outside of blocks comes first and last.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.traced.module import BACKWARD, OUTSIDE, Pass, Segment


@dataclass(frozen=True, slots=True)
class Stretch:
    """One segment, with what went before it; positions of blocks, OUTSIDE where it is none."""

    segment: Segment
    gathered: tuple[int, ...]  # blocks that had their forward pass, less those that are done
    last_gathered: int
    gathers: tuple[Segment, int] | None  # its block, after this segment and that block before it
    coming: int | None  # the next block's backward pass; None: there is none
    done: tuple[int, ...]  # blocks whose backward passes are over
    last_reduced: int | None
    reduces: bool  # the gradients of its block are complete at its end

    @property
    def backward(self) -> bool:
        """Whether it belongs to the backward pass."""
        return self.segment.phase == BACKWARD


def stretches(one: Pass) -> tuple[Stretch, ...]:
    """Walk through a pass."""
    segments = one.segments
    last: dict[int, int] = {}  # block -> its last backward segment
    for position, segment in enumerate(segments):
        if segment.phase == BACKWARD and segment.block != OUTSIDE:
            last[segment.block] = position
    if segments:
        last[OUTSIDE] = len(segments) - 1
    found: list[Stretch] = []
    started: list[int] = []
    done: list[int] = []
    for position, segment in enumerate(segments):
        block, backward = segment.block, segment.phase == BACKWARD
        gathers = None
        if not backward and block != OUTSIDE and block not in started:
            if position:
                gathers = (segments[position - 1], started[-1] if started else OUTSIDE)
            started.append(block)
        following = (s.block for s in segments[position + 1 :] if s.block not in (OUTSIDE, block))
        ends = backward and last.get(block) == position
        found.append(
            Stretch(
                segment=segment,
                gathered=tuple(b for b in started if b not in done),
                last_gathered=started[-1] if started else OUTSIDE,
                gathers=gathers,
                coming=next(following, None) if backward else None,
                done=tuple(done),
                last_reduced=done[-1] if done else None,
                reduces=ends,
            )
        )
        if ends and block != OUTSIDE:
            done.append(block)
    return tuple(found)
