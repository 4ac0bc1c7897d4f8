"""What a load decides before it takes memory: options, cuts, cache, threads; over ranks, agreed; and what it would be like.

Comes in: a described model and options. Goes out: a `LoadPlan`, a `ModelForecast`.
"""
