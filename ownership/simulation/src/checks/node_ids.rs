//! A node's id is assigned once: to one folder, and never again.

use std::collections::BTreeMap;

use ledger::{AdmitNode, Command, Outcome};
use vocabulary::NodeId;

use crate::ensure;
use crate::property::PropertyResult;

const ONCE: &str = "a node's id is given once";

#[derive(Debug, Default)]
pub(crate) struct NodeIdCheck {
    id_by_nonce: BTreeMap<u128, NodeId>,
    last: NodeId,
}

impl NodeIdCheck {
    pub(crate) fn on_applied(&mut self, command: &Command, outcome: &Outcome) -> PropertyResult {
        let (Command::AdmitNode(AdmitNode { nonce, .. }), Outcome::Admitted { node }) = (command, outcome) else {
            return Ok(());
        };
        if let Some(first) = self.id_by_nonce.get(nonce) {
            return ensure!(first == node, ONCE, "folder {nonce} was given {first}, then {node}");
        }
        let last = std::mem::replace(&mut self.last, *node);
        self.id_by_nonce.insert(*nonce, *node);
        ensure!(last < *node, ONCE, "folder {nonce} was given {node} after {last} had been given")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_id_belongs_to_one_data_directory() {
        let mut ids = NodeIdCheck::default();
        let mut admit = |nonce, node| {
            let command = Command::AdmitNode(AdmitNode { nonce, address: "a:1".into() });
            ids.on_applied(&command, &Outcome::Admitted { node: NodeId(node) })
        };
        assert_eq!([admit(7, 2), admit(8, 3), admit(7, 2), admit(9, 4)], [Ok(()), Ok(()), Ok(()), Ok(())]);
        assert!(admit(8, 5).is_err() && admit(10, 4).is_err() && admit(11, 3).is_err());
    }
}
