"""The watches of the API server: kopf, what works around it, and the informer that feeds the cache.

Only this room imports kopf. kopf gives discovery, watching, reconnection and authentication; reconciling is `loop`'s.
"""
