//! engine-model.
