"""One module for each target: ``TARGET``, a ``planner.exchange.target.Target``; shared keys."""
