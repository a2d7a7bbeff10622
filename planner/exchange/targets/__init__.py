"""One module for each target: ``TARGET``, an instance of ``planner.exchange.target.Target``."""
