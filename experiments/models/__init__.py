"""Language-model roles, judges, rubrics and the encoder."""
