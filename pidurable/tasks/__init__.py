"""Task definitions, their context, the scheduler and the ownership tree."""
