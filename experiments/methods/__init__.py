"""One home for every equation, and the step that puts them in order."""
