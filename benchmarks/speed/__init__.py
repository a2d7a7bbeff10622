"""How long shardplan itself takes to start and to answer."""
