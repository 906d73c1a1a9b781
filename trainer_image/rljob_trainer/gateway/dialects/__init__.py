"""The APIs of the gateway: each translates its requests and answers. Pure."""
