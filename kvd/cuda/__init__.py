"""What kvd needs of a GPU, over the CUDA driver API: devices, memory that processes share, streams and copies.

Import it late, where a GPU is used: nothing else needs the extra `kvd[cuda]`. It is cuda-bindings, not cuda-core, whose
virtual memory can neither be exported nor imported, and which needs numpy in every worker.
"""
