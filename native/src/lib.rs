//! The hot path of EscrowMQ's broker.
mod access;
mod batch;
mod half;
mod header;
mod java_hash;
mod key_index;
mod log_check;
mod log_tail;
mod offset_map;
mod properties;
mod pull;
mod record;
mod response;
mod restore;
mod shared_bytes;

use pyo3::prelude::*;

#[pymodule]
pub mod escrowmq_native {

    /// escrowmq uses this module only if both have the same number; see escrowmq/native.py.
    #[pymodule_export]
    const INTERFACE_VERSION: u32 = 4;

    #[pymodule_export]
    use crate::batch::{Applied, Batch, PlainRequests};
    #[pymodule_export]
    use crate::half::{Half, HalfTable, HalfTotals};
    #[pymodule_export]
    use crate::key_index::{KeyBlock, LinkedEntries, link_entries, merge_words, plan_words};
    #[pymodule_export]
    use crate::log_check::records_are_right;
    #[pymodule_export]
    use crate::shared_bytes::PieceBuffer;
}
