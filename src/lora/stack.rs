//! Adapters on a loaded model: fitted once, switched on and off between passes, stacked. The base weights stay as they
//! are and are never copied.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use super::adapter::Adapter;
use super::error::AdapterError;
use super::low_rank::LowRank;

/// A module that adapters may be for.
#[derive(Clone, Debug)]
pub struct Module {
    /// Its path in the model.
    pub path: String,
    /// Its shape.
    pub kind: Kind,
}

/// What a module is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Maps `input` features to `output`.
    Linear {
        /// Features in.
        input: i32,
        /// Features out.
        output: i32,
    },
    /// `count` vectors of `dims` features.
    Embedding {
        /// Vectors.
        count: i32,
        /// Features of each.
        dims: i32,
    },
}

/// What one adapter adds to the modules of the model that it was fitted to.
#[derive(Debug)]
pub struct FittedAdapter {
    /// By the module's number.
    parts: HashMap<usize, LowRank>,
}

impl FittedAdapter {
    /// From what is added to modules, by their numbers in [`Adapters::modules`]; shapes are the caller's business.
    pub fn from_parts(parts: impl IntoIterator<Item = (usize, LowRank)>) -> Self {
        Self { parts: parts.into_iter().collect() }
    }

    /// Modules that it adapts.
    pub fn modules(&self) -> usize {
        self.parts.len()
    }

    /// Bytes of its weights.
    pub fn nbytes(&self) -> usize {
        let arrays =
            self.parts.values().flat_map(|part| [&part.a, &part.b].into_iter().chain(&part.magnitude));
        arrays.map(crate::mlx::Array::nbytes).sum()
    }

    /// Whether it can be applied together with others: DoRA sets the length of each row of one sum.
    pub fn can_stack(&self) -> bool {
        self.parts.values().all(|part| part.magnitude.is_none())
    }
}

/// Adapters that are applied together, in order; none stands for the base model.
#[derive(Clone, Debug, Default)]
pub struct AdapterSet {
    adapters: Vec<Rc<FittedAdapter>>,
}

impl AdapterSet {
    /// Applies these in this order.
    ///
    /// # Errors
    /// They cannot be stacked.
    pub fn new(adapters: Vec<Rc<FittedAdapter>>) -> Result<Self, AdapterError> {
        if adapters.len() > 1 && !adapters.iter().all(|adapter| adapter.can_stack()) {
            return Err(AdapterError::Stack);
        }
        Ok(Self { adapters })
    }
}

#[derive(Debug, Default)]
struct Inner {
    modules: Vec<Module>,
    active: AdapterSet,
}

/// A model's modules and the adapters that passes apply now. Clones share both.
#[derive(Clone, Debug, Default)]
pub struct Adapters {
    inner: Rc<RefCell<Inner>>,
}

impl Adapters {
    /// Notes the linear module at `path`, which maps `input` features to `output`, and returns its view of what is active.
    pub fn module(&self, path: &str, input: i32, output: i32) -> ModuleAdapters {
        self.add(path, Kind::Linear { input, output })
    }

    /// The same for an embedding of `count` vectors of `dims` features.
    pub fn embedding(&self, path: &str, count: i32, dims: i32) -> ModuleAdapters {
        self.add(path, Kind::Embedding { count, dims })
    }

    fn add(&self, path: &str, kind: Kind) -> ModuleAdapters {
        let modules = &mut self.inner.borrow_mut().modules;
        modules.push(Module { path: path.to_owned(), kind });
        ModuleAdapters { adapters: self.clone(), index: modules.len() - 1 }
    }

    /// The modules, in the order in which the model has them.
    pub fn modules(&self) -> Vec<Module> {
        self.inner.borrow().modules.clone()
    }

    /// Finds the module of each part of an adapter.
    ///
    /// # Errors
    /// A part that has no module here, or does not fit it; whole weights.
    pub fn fit(&self, mut adapter: Adapter) -> Result<Rc<FittedAdapter>, AdapterError> {
        if adapter.whole().is_some() {
            return Err(AdapterError::Mount);
        }
        let mut parts = HashMap::new();
        for (index, Module { path, kind }) in self.inner.borrow().modules.iter().enumerate() {
            let part = match *kind {
                Kind::Linear { input, output } => adapter.take(path, input, output)?,
                Kind::Embedding { count, dims } => adapter.take_embedding(path, count, dims)?,
            };
            if let Some(part) = part {
                parts.insert(index, part);
            }
        }
        adapter.finish()?;
        Ok(Rc::new(FittedAdapter { parts }))
    }

    /// Applies these from the next pass on.
    pub fn activate(&self, set: &AdapterSet) {
        self.inner.borrow_mut().active.clone_from(set);
    }

    /// Whether any adapter is applied.
    pub fn any_active(&self) -> bool {
        !self.inner.borrow().active.adapters.is_empty()
    }
}

/// A module's view of its model's adapters.
#[derive(Clone, Debug)]
pub struct ModuleAdapters {
    adapters: Adapters,
    index: usize,
}

impl ModuleAdapters {
    /// What is added to the module now, in order; usually nothing.
    pub fn parts(&self) -> Vec<LowRank> {
        let inner = self.adapters.inner.borrow();
        inner.active.adapters.iter().filter_map(|adapter| adapter.parts.get(&self.index)).cloned().collect()
    }
}
