"""ScienceWorld (RLDS App. D.3): the real simulator in a pool of Java processes, its reward shaping and its splits."""
