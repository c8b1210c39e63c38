"""Server and clients on machines of their own: what they send each other, and what each side does with it.

``messages`` is the content of every message, ``node`` the client side, ``federation`` the server side. They know
nothing of a transport: ``channel`` is what they need of one, and ``flower`` the one there is.
"""
