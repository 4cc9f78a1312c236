"""The method language, the stages that it names, and what they cost."""
