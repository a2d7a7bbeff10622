"""Files of other trainers: a plan is written as one, and one is read as options of ``fit``.

A target is a trainer with one table in ``capabilities.toml`` (its limits) and one module in
``targets`` (its keys). A key states which option it carries in both directions, so that what is
written and what is read cannot disagree.
"""
