"""What a person types: commands, tables and progress. No logic of the protocol lives here.

``main`` is the entry point; each command module holds one group of commands. Heavy libraries are
imported inside the commands that need them, so that ``shoal status`` answers at once.
"""
