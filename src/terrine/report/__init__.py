"""Pictures and pages: what a person looks at."""
