//! A store that workers share (vLLM's ExampleConnector, LMCache, Mooncake's store): the source writes what it computes,
//! the target reads what it finds under the same prompt. No parameters, and nothing to be found means that it computes.

use super::{Dialect, Order};

pub(super) struct Speaker;

impl Dialect for Speaker {
    fn order(&self) -> Option<Order> {
        Some(Order::Stored)
    }
}
