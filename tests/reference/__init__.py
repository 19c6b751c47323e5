"""An independent plain training loop: what one computer would have computed.

It imports nothing of the project. Model, recipes and optimisers are written again from their
documentation, so that an error in ``stages`` or ``protocol`` cannot hide in what checks them.
"""
