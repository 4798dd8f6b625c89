"""Results for people: files, tables, figures. Nothing heavy is imported before it is used."""
