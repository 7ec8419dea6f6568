"""Models: shapes, weights, the decoder and its tokenizer. Refuses to know pages, batches and graphs.

Nothing is imported here, so that reading a shape never pays for torch.
"""
