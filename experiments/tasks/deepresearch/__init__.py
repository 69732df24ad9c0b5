"""DeepResearch: long answers from four search and reading tools, scored by rubric (RLDS App. C.4 and D.4)."""
