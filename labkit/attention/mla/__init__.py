"""Multi-head latent attention (MLA): what DeepSeek-V2 and V3 put in the place of K and V, its two forms, its backends.

A token keeps one latent and one rotated key for all heads. *Absorbed*: the up-projection of keys goes into the query
and that of values behind the result, so that attention is MQA over the cache as it lies; what a backend computes.
*Expanded*: keys and values of every head are made again from the latents of a chunk's context, piece by piece; fewer
operations where one read of them serves many queries.
"""
