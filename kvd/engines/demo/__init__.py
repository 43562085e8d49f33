"""A small engine with a real transformer, for `kvd demo`: its paged KV cache lies in pools that kvd lends."""
