//! ownership.
