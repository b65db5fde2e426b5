"""Plumbing that every HTTP service of tilewise shares: the board of a class and the tuning service.

- `limits.Limits` bounds bodies, rates and concurrent requests before a route is looked up.
- `connections.GuardedProtocol` bounds connections, half-sent headers and idle clients.
- `tokens.new_token` makes an access token; services store its hash only.

Nothing here imports a web framework before a server is started.
"""
