//! OpenAI's API: no transfers.

use super::{Dialect, Order};

pub(super) struct Speaker;

impl Dialect for Speaker {
    fn order(&self) -> Option<Order> {
        None
    }
}
