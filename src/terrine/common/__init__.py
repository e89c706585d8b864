"""What several packages share: keys and their noise, generators, people's rows, the count of releases.

Nothing is imported here, so that nothing needs torch before it is used.
"""
