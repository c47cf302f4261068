"""Is this machine ready?"""
