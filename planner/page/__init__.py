"""The local page of ``shardplan serve``: questions in the address, answers as HTML."""
