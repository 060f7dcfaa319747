//! A simulated worker behind a real HTTP server.
