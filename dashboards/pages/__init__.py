"""The pages: one file for each, which collects what it shows and names its template."""
