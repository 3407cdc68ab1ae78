"""OpenDataFlow for Dagster: run the next chunk of data that is ready.

Nothing is imported here: a cron line that runs one script pays only for what it uses.
"""

__version__ = "0.1.0"
