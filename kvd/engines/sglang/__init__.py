"""SGLang on kvd: the transfer backend `kvd`, which `plugin` makes known to SGLang.

SGLang's scheduler process makes its KV cache in the daemon's pool (`memory`) and asks a manager (`manager`), with a
sender or a receiver for each request (`sides`), for transfers. Sessions with the daemon and messages between engines
have a thread of their own (`transfers`), so pulls start and end between the engine's steps.
"""
