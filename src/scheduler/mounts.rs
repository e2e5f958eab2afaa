//! Adapters that requests can name.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;

use super::request::{AdapterInfo, GenerationError, MountError};
use crate::lora::{Adapter, AdapterSet, FittedAdapter};
use crate::models::Model;

/// Mounted adapters in the order in which a request applies them.
#[derive(Clone, Debug, Default)]
pub(super) struct AdapterStack {
    /// Unlike names, numbers are never used again.
    pub(super) numbers: Vec<u64>,
    pub(super) set: AdapterSet,
}

struct Mounted {
    number: u64,
    adapter: Rc<FittedAdapter>,
}

/// All of them, by name.
#[derive(Default)]
pub(super) struct Mounts {
    mounted: BTreeMap<String, Mounted>,
    /// Adapters mounted so far.
    count: u64,
}

impl Mounts {
    /// Fits an adapter to the model and gives it a name.
    pub(super) fn mount(
        &mut self,
        model: &dyn Model,
        id: String,
        path: PathBuf,
        adapter: Adapter,
    ) -> Result<AdapterInfo, MountError> {
        if self.mounted.contains_key(&id) {
            return Err(MountError::Taken(id));
        }
        let adapter = model.adapters().fit(adapter)?;
        let info = AdapterInfo {
            id: id.clone(),
            path,
            modules: adapter.modules(),
            bytes: adapter.nbytes(),
            can_stack: adapter.can_stack(),
        };
        self.count += 1;
        self.mounted.insert(id, Mounted { number: self.count, adapter });
        Ok(info)
    }

    /// Frees a name; returns the number of what it stood for.
    pub(super) fn unmount(&mut self, id: &str) -> Result<u64, MountError> {
        let mounted = self.mounted.remove(id).ok_or_else(|| MountError::Unknown(id.to_owned()))?;
        Ok(mounted.number)
    }

    /// What names stand for now.
    pub(super) fn stack(&self, names: &[String]) -> Result<AdapterStack, GenerationError> {
        let mounted =
            |name: &String| self.mounted.get(name).ok_or_else(|| GenerationError::AdapterGone(name.clone()));
        let mounted = names.iter().map(mounted).collect::<Result<Vec<_>, _>>()?;
        Ok(AdapterStack {
            numbers: mounted.iter().map(|mounted| mounted.number).collect(),
            set: AdapterSet::new(mounted.iter().map(|mounted| Rc::clone(&mounted.adapter)).collect())?,
        })
    }
}
