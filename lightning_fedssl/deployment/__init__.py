"""Server and clients on separate machines: their messages, and the code of each side.

``messages`` is the content of every message, ``node`` the client side, ``federation`` the server side. They do not
depend on a transport: ``channel`` is the interface of a transport, and ``flower`` implements it.
"""
