"""The routes, by what they are about. Each says who may use it; `policy` holds them to it."""
