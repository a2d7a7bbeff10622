"""``shardplan models``, ``hardware`` and ``software``: their options."""

from __future__ import annotations

from typing import Annotated

from hardware_profiles.options import Option
from hardware_profiles.software.trainer import software_names
from hardware_profiles.terminal import show
from planner.cli.options import Json
from planner.request.options import proposals


def models(
    name: Annotated[
        str | None,
        Option(
            "NAME",
            complete=proposals.models,
            help="one model, as in fit; llama lists all that begin so",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the presets, or show what one model is made of."""
    from planner.cli.listings.listing import model_listing, model_text, models_text, names_one_model
    from planner.text.answer import json_text

    listed = model_listing(name or "")
    if name is None or (len(listed["models"]) > 1 and not names_one_model(name)):
        show(json_text(listed) if json else models_text(listed))
        return
    from planner.cli.listings.listing import one_model

    document = one_model(name)
    show(json_text(document) if json else model_text(document))


def hardware(
    name: Annotated[
        str | None,
        Option(
            "NAME",
            complete=proposals.accelerator_names,
            help="an accelerator, as in a CLUSTER: H100 lists those of the name",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the accelerators, or show the figures of one with their sources."""
    from hardware_profiles.cluster.parse import accelerator_name
    from planner.cli.listings.listing import (
        accelerator_text,
        accelerators_text,
        hardware_listing,
        hardware_named,
        one_accelerator,
    )
    from planner.text.answer import json_text

    name = None if name is None else accelerator_name(name)
    several = hardware_listing() if name is None else hardware_named(name)
    if name is None or several is not None:
        assert several is not None
        show(json_text(several) if json else accelerators_text(several))
        return
    document = one_accelerator(name)
    show(json_text(document) if json else accelerator_text(document))


def software(
    name: Annotated[
        str | None,
        Option(
            "NAME",
            values=software_names,
            help="part of a name: megatron lists those that contain it",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the trainers and engines that ``--software`` takes."""
    from planner.cli.listings.listing import software_listing, software_text
    from planner.text.answer import json_text

    document = software_listing(name or "")
    show(json_text(document) if json else software_text(document))
