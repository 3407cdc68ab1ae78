"""The store: our tables in PostgreSQL or SQLite, who may produce which chunk, and how it went."""
