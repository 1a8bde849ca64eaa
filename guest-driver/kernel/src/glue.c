// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
/*
 * The thin C side of the module: see glue.h. HAVE_* come from probes of the kernel's headers
 * (Kbuild).
 */
#include <linux/completion.h>
#include <linux/delay.h>
#include <linux/cpumask.h>
#include <linux/etherdevice.h>
#include <linux/inetdevice.h>
#include <linux/if_arp.h>
#include <linux/io.h>
#include <linux/ktime.h>
#include <linux/lockdep.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/semaphore.h>
#include <linux/sizes.h>
#include <linux/virtio_ids.h>
#include <linux/virtio_pci.h>
#include <linux/vmalloc.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>
#include <rdma/ib_pma.h>
#ifdef HAVE_RDMA_ITER_H
#include <rdma/iter.h>
#endif

#include <net/addrconf.h>
#include <net/if_inet6.h>
#include <net/ipv6.h>
#include <net/netlink.h>
#include <rdma/restrack.h>
#include <rdma/uverbs_std_types.h>
#include <uapi/rdma/rdma_netlink.h>
#define UVERBS_MODULE_NAME vrdma
#include <rdma/uverbs_named_ioctl.h>

#include "glue.h"

/* What bindgen (clang) says of the structures, checked by the compiler that builds the kernel. */
#include "layout.h"

#ifndef CONFIG_X86_64
#error "virtio_rdma supports x86-64 only: its rings rely on cache-coherent DMA of 4 KiB pages"
#endif

static const struct virtio_device_id vrdma_ids[] = {
	{ VRDMA_DEVICE_ID, VIRTIO_DEV_ANY_ID },
	{ 0 },
};
MODULE_DEVICE_TABLE(virtio, vrdma_ids);

static const unsigned int vrdma_features[] = {
	VRDMA_FEATURE_RC,
	VRDMA_FEATURE_UD,
	VRDMA_FEATURE_UC,
	VRDMA_FEATURE_SRQ,
	VRDMA_FEATURE_XRC,
	VRDMA_FEATURE_ATOMIC,
	VRDMA_FEATURE_MW,
	VRDMA_FEATURE_REREG_MR,
	VRDMA_FEATURE_RESIZE_CQ,
	VRDMA_FEATURE_CQ_TIMESTAMP,
	VRDMA_FEATURE_FLUSH,
	VRDMA_FEATURE_PHYSICAL_MR,
	VRDMA_FEATURE_SRQ_RESIZE,
	VRDMA_FEATURE_CQ_MODERATION,
	VRDMA_FEATURE_FAST_REG,
	VRDMA_FEATURE_PORT_STATE,
	VRDMA_FEATURE_HEADER_TYPE,
	VRDMA_FEATURE_COUNTERS,
	VRDMA_FEATURE_SRD,
	VRDMA_FEATURE_IWARP,
};
/* The rest of the driver asks for each, and asking for one that is not here is a BUG. */
static_assert(ARRAY_SIZE(vrdma_features) == VRDMA_FEATURES);

/* None of these goes with connections of iWARP. */
static const unsigned int vrdma_not_iwarp[] = {
	VRDMA_FEATURE_UD,
	VRDMA_FEATURE_UC,
	VRDMA_FEATURE_XRC,
	VRDMA_FEATURE_FLUSH,
	VRDMA_FEATURE_HEADER_TYPE,
	VRDMA_FEATURE_SRD,
};

/* A device must not offer these without what they need, or with what they exclude. If one does, we go without. */
static int vrdma_validate(struct virtio_device *vdev)
{
	size_t i;

	if (virtio_has_feature(vdev, VRDMA_FEATURE_IWARP))
		for (i = 0; i < ARRAY_SIZE(vrdma_not_iwarp); i++)
			__virtio_clear_bit(vdev, vrdma_not_iwarp[i]);
	if (!virtio_has_feature(vdev, VRDMA_FEATURE_SRQ)) {
		__virtio_clear_bit(vdev, VRDMA_FEATURE_XRC);
		__virtio_clear_bit(vdev, VRDMA_FEATURE_SRQ_RESIZE);
	}
	if (!virtio_has_feature(vdev, VRDMA_FEATURE_PHYSICAL_MR))
		__virtio_clear_bit(vdev, VRDMA_FEATURE_FAST_REG);
	return 0;
}

static void vrdma_device_shutdown(struct device *dev)
{
	vrdma_shutdown(dev_to_virtio(dev));
}

static int vrdma_device_probe(struct virtio_device *vdev)
{
	/* Newer buses reset their devices themselves, and warn of drivers that would do it, too. */
	if (!vdev->dev.bus->shutdown)
		vdev->dev.driver->shutdown = vrdma_device_shutdown;
	return vrdma_probe(vdev);
}

static struct virtio_driver vrdma_driver = {
	.driver.name = KBUILD_MODNAME,
	.id_table = vrdma_ids,
	.feature_table = vrdma_features,
	.feature_table_size = ARRAY_SIZE(vrdma_features),
	.validate = vrdma_validate,
	.probe = vrdma_device_probe,
	.remove = vrdma_remove,
	.config_changed = vrdma_config_changed,
#ifdef CONFIG_PM_SLEEP
	.freeze = vrdma_freeze,
	.restore = vrdma_restore,
#endif
};

/*
 * Frozen with the processes: a device is taken into use again only when the whole system is back.
 */
static struct workqueue_struct *vrdma_rebinds;

static int __init vrdma_init(void)
{
	int ret;

	vrdma_rebinds = alloc_workqueue("virtio_rdma", WQ_UNBOUND | WQ_FREEZABLE, 0);
	if (!vrdma_rebinds)
		return -ENOMEM;
	ret = register_virtio_driver(&vrdma_driver);
	if (ret)
		destroy_workqueue(vrdma_rebinds);
	return ret;
}
module_init(vrdma_init);

static void __exit vrdma_exit(void)
{
	unregister_virtio_driver(&vrdma_driver);
	/* Waits for the last item: it runs code of this module. */
	destroy_workqueue(vrdma_rebinds);
}
module_exit(vrdma_exit);

MODULE_DESCRIPTION("Virtio RDMA driver");
MODULE_AUTHOR("virtio-rdma developers");
MODULE_LICENSE("GPL");

struct module *vrdma_this_module(void)
{
	return THIS_MODULE;
}

void vrdma_panic(void)
{
	BUG();
}

void vrdma_log_error(struct device *dev, const char *text, size_t length, s64 number)
{
	dev_err(dev, "%.*s (%lld)\n", (int)length, text, number);
}

void vrdma_log_errno(struct device *dev, const char *text, size_t length, int error)
{
	dev_err(dev, "%.*s: %pe\n", (int)length, text, ERR_PTR(error));
}

void vrdma_log_warning(struct device *dev, const char *text, size_t length)
{
	dev_warn(dev, "%.*s\n", (int)length, text);
}

void vrdma_log_info(struct device *dev, const char *text, size_t length, s64 number)
{
	dev_info(dev, "%.*s (%lld)\n", (int)length, text, number);
}

/* Memory. */

static gfp_t vrdma_gfp(bool may_sleep)
{
	return may_sleep ? GFP_KERNEL : GFP_ATOMIC | __GFP_NOWARN;
}

void *vrdma_kzalloc(size_t size, bool may_sleep)
{
	return kzalloc(size, vrdma_gfp(may_sleep));
}

void *vrdma_kvzalloc(size_t count, size_t size, bool may_sleep)
{
	return kvcalloc(count, size, vrdma_gfp(may_sleep));
}

/* Else pieces of memory end at 64 KiB, and with them the pages that the device is told of. */
void vrdma_dma_unlimited(struct device *dev)
{
	dma_set_max_seg_size(dev, SZ_2G);
	dma_set_seg_boundary(dev, ULONG_MAX);
}

void *vrdma_page_alloc(struct device *dev, dma_addr_t *addr, bool may_sleep)
{
	void *page = (void *)get_zeroed_page(vrdma_gfp(may_sleep));

	if (!page)
		return NULL;
	*addr = dma_map_single(dev, page, PAGE_SIZE, DMA_BIDIRECTIONAL);
	if (dma_mapping_error(dev, *addr)) {
		free_page((unsigned long)page);
		return NULL;
	}
	return page;
}

void vrdma_page_free(struct device *dev, void *page, dma_addr_t addr)
{
	dma_unmap_single(dev, addr, PAGE_SIZE, DMA_BIDIRECTIONAL);
	free_page((unsigned long)page);
}

bool vrdma_page_is_physical(void *page, dma_addr_t addr)
{
	return addr == virt_to_phys(page);
}

/* Pages of vrdma_page_alloc, one after the other. */
void *vrdma_pages_map(void *const *pages, size_t count)
{
	struct page **list = kvmalloc_array(count, sizeof(*list), GFP_KERNEL);
	void *mapped;
	size_t i;

	if (!list)
		return NULL;
	for (i = 0; i < count; i++)
		list[i] = virt_to_page(pages[i]);
	mapped = vmap(list, count, VM_MAP, PAGE_KERNEL);
	kvfree(list);
	return mapped;
}

void vrdma_pages_unmap(void *mapped)
{
	vunmap(mapped);
}

/* Synchronization. */

/* What is initialized in one place is one lock to lockdep, unless it is told better. */
static struct lock_class_key vrdma_lock_keys[VRDMA_LOCKS];
static const char *const vrdma_lock_names[VRDMA_LOCKS] = {
	[VRDMA_LOCK_COMMANDS] = "vrdma commands",
	[VRDMA_LOCK_DYING] = "vrdma dying",
	[VRDMA_LOCK_OBJECT] = "vrdma object",
	[VRDMA_LOCK_CQ] = "vrdma cq",
	[VRDMA_LOCK_SEND] = "vrdma send",
	[VRDMA_LOCK_RECV] = "vrdma recv",
	[VRDMA_LOCK_REGION] = "vrdma region",
	[VRDMA_LOCK_CONNECTIONS] = "vrdma connections",
};

spinlock_t *vrdma_spinlock_new(enum vrdma_lock which)
{
	spinlock_t *lock = kzalloc(sizeof(*lock), GFP_KERNEL);

	if (lock) {
		spin_lock_init(lock);
		lockdep_set_class_and_name(lock, &vrdma_lock_keys[which], vrdma_lock_names[which]);
	}
	return lock;
}

unsigned long vrdma_spinlock_lock(spinlock_t *lock)
{
	unsigned long flags;

	spin_lock_irqsave(lock, flags);
	return flags;
}

void vrdma_spinlock_unlock(spinlock_t *lock, unsigned long flags)
{
	spin_unlock_irqrestore(lock, flags);
}

struct mutex *vrdma_mutex_new(enum vrdma_lock which)
{
	struct mutex *lock = kzalloc(sizeof(*lock), GFP_KERNEL);

	if (lock) {
		mutex_init(lock);
		lockdep_set_class_and_name(lock, &vrdma_lock_keys[which], vrdma_lock_names[which]);
	}
	return lock;
}

void vrdma_mutex_lock(struct mutex *lock)
{
	mutex_lock(lock);
}

void vrdma_mutex_unlock(struct mutex *lock)
{
	mutex_unlock(lock);
}

struct completion *vrdma_completion_new(void)
{
	struct completion *done = kzalloc(sizeof(*done), GFP_KERNEL);

	if (done)
		init_completion(done);
	return done;
}

bool vrdma_completion_wait(struct completion *done, unsigned int milliseconds)
{
	return wait_for_completion_timeout(done, msecs_to_jiffies(milliseconds)) != 0;
}

void vrdma_sleep(unsigned int milliseconds)
{
	msleep(milliseconds);
}

u64 vrdma_milliseconds(void)
{
	return ktime_to_ms(ktime_get());
}

struct semaphore *vrdma_semaphore_new(int count)
{
	struct semaphore *sem = kzalloc(sizeof(*sem), GFP_KERNEL);

	if (sem)
		sema_init(sem, count);
	return sem;
}

struct vrdma_work {
	struct work_struct work;
	void (*run)(void *arg);
	void *arg;
};

static void vrdma_work_run(struct work_struct *work)
{
	struct vrdma_work *this = container_of(work, struct vrdma_work, work);

	this->run(this->arg);
}

struct vrdma_work *vrdma_work_new(void (*run)(void *arg), void *arg)
{
	struct vrdma_work *work = kzalloc(sizeof(*work), GFP_KERNEL);

	if (work) {
		INIT_WORK(&work->work, vrdma_work_run);
		work->run = run;
		work->arg = arg;
	}
	return work;
}

void vrdma_work_schedule(struct vrdma_work *work)
{
	schedule_work(&work->work);
}

void vrdma_work_cancel(struct vrdma_work *work)
{
	cancel_work_sync(&work->work);
}

void vrdma_work_free(struct vrdma_work *work)
{
	cancel_work_sync(&work->work);
	kfree(work);
}

/*
 * Unbinding the driver from a device that was lost, and binding it again. The item outlives the
 * binding that asked for it: that one goes in the middle. Held by the binding, and by the work
 * while it is scheduled.
 */
struct vrdma_rebind {
	struct delayed_work work;
	struct virtio_device *vdev;
	refcount_t users;
	/* Somebody else unbound the device meanwhile: then it is theirs to bind it. */
	bool cancelled;
	struct task_struct *runner;
};

static void vrdma_rebind_put(struct vrdma_rebind *rebind)
{
	if (refcount_dec_and_test(&rebind->users)) {
		put_device(&rebind->vdev->dev);
		kfree(rebind);
	}
}

static void vrdma_rebind_run(struct work_struct *work)
{
	struct vrdma_rebind *rebind = container_of(to_delayed_work(work), struct vrdma_rebind, work);
	struct device *dev = &rebind->vdev->dev;

	WRITE_ONCE(rebind->runner, current);
	if (!READ_ONCE(rebind->cancelled))
		device_release_driver(dev);
	/* Failed probes have logged why. */
	if (!READ_ONCE(rebind->cancelled) && device_attach(dev) <= 0)
		dev_err(dev, "the device could not be taken into use again; binding the driver by hand may help\n");
	vrdma_rebind_put(rebind);
}

struct vrdma_rebind *vrdma_rebind_new(struct virtio_device *vdev)
{
	struct vrdma_rebind *rebind = kzalloc(sizeof(*rebind), GFP_KERNEL);

	if (rebind) {
		INIT_DELAYED_WORK(&rebind->work, vrdma_rebind_run);
		get_device(&vdev->dev);
		rebind->vdev = vdev;
		refcount_set(&rebind->users, 1);
	}
	return rebind;
}

/* At most once. */
void vrdma_rebind_schedule(struct vrdma_rebind *rebind, unsigned int milliseconds)
{
	refcount_inc(&rebind->users);
	queue_delayed_work(vrdma_rebinds, &rebind->work, msecs_to_jiffies(milliseconds));
}

/* The binding goes: because of the work, or of somebody else. */
void vrdma_rebind_free(struct vrdma_rebind *rebind)
{
	if (READ_ONCE(rebind->runner) != current) {
		WRITE_ONCE(rebind->cancelled, true);
		if (cancel_delayed_work(&rebind->work))
			vrdma_rebind_put(rebind);
	}
	vrdma_rebind_put(rebind);
}

struct xarray *vrdma_table_new(void)
{
	struct xarray *table = kzalloc(sizeof(*table), GFP_KERNEL);

	if (table)
		xa_init_flags(table, XA_FLAGS_LOCK_IRQ);
	return table;
}

void vrdma_table_free(struct xarray *table)
{
	xa_destroy(table);
	kfree(table);
}

int vrdma_table_insert(struct xarray *table, u64 index, void *entry)
{
	return xa_err(xa_store_irq(table, index, entry, GFP_KERNEL));
}

/* Only if it is still there: the device may already have given the number to a newer object. */
void vrdma_table_remove(struct xarray *table, u64 index, void *entry)
{
	xa_cmpxchg_irq(table, index, entry, NULL, GFP_KERNEL);
}

/* The first entry from `index` on, which is then its index. Under the lock. */
void *vrdma_table_next(struct xarray *table, unsigned long *index)
{
	return xa_find(table, index, ULONG_MAX, XA_PRESENT);
}

unsigned long vrdma_table_lock(struct xarray *table)
{
	unsigned long flags;

	xa_lock_irqsave(table, flags);
	return flags;
}

void vrdma_table_unlock(struct xarray *table, unsigned long flags)
{
	xa_unlock_irqrestore(table, flags);
}

/* Virtio. */

bool vrdma_has_feature(const struct virtio_device *vdev, unsigned int bit)
{
	return virtio_has_feature(vdev, bit);
}

static struct pci_dev *vrdma_pci(struct virtio_device *vdev)
{
	struct device *parent = vdev->dev.parent;

	return parent && dev_is_pci(parent) ? to_pci_dev(parent) : NULL;
}

bool vrdma_is_gone(struct virtio_device *vdev)
{
	struct pci_dev *pdev = vrdma_pci(vdev);

	return pdev && !pci_device_is_present(pdev);
}

bool vrdma_needs_reset(struct virtio_device *vdev)
{
	return vdev->config->get_status(vdev) & VIRTIO_CONFIG_S_NEEDS_RESET;
}

/* Four bytes at a time: with a device outside of the VMM every access is a message to it. */
void vrdma_config_read(struct virtio_device *vdev, unsigned int offset, __le32 *to, unsigned int words)
{
	u32 generation, again = vdev->config->generation(vdev);
	unsigned int i, tries = 0;

	do {
		generation = again;
		for (i = 0; i < words; i++)
			vdev->config->get(vdev, offset + 4 * i, &to[i], sizeof(to[i]));
		again = vdev->config->generation(vdev);
	} while (again != generation && ++tries < 100);
}

int vrdma_find_vqs(struct virtio_device *vdev, unsigned int total, unsigned int first_doorbell,
		   struct virtqueue **vqs)
{
	struct virtqueue_info *info;
	unsigned int i;
	int ret;

	info = kcalloc(total, sizeof(*info), GFP_KERNEL);
	if (!info)
		return -ENOMEM;
	for (i = 0; i < total; i++) {
		if (i == 0)
			info[i].name = "control";
		else if (i == VRDMA_EVENT_QUEUE)
			info[i].name = "events";
		else if (i < first_doorbell)
			info[i].name = devm_kasprintf(&vdev->dev, GFP_KERNEL, "completion.%u",
						      i - VRDMA_FIRST_COMPLETION_QUEUE);
		else
			info[i].name = devm_kasprintf(&vdev->dev, GFP_KERNEL, "doorbell.%u", i - first_doorbell);
		if (!info[i].name) {
			ret = -ENOMEM;
			goto out;
		}
		if (i < first_doorbell)
			info[i].callback = vrdma_vq_callback;
	}
	ret = virtio_find_vqs(vdev, total, vqs, info, NULL);
out:
	kfree(info);
	return ret;
}

void vrdma_del_vqs(struct virtio_device *vdev)
{
	vdev->config->del_vqs(vdev);
}

void vrdma_device_ready(struct virtio_device *vdev)
{
	virtio_device_ready(vdev);
}

/* A device that was pulled out answers nothing: waiting for its reset would never end. */
void vrdma_reset(struct virtio_device *vdev)
{
	if (vrdma_is_gone(vdev))
		virtio_break_device(vdev);
	else
		virtio_reset_device(vdev);
}

void vrdma_vq_spread(struct virtqueue *vq, unsigned int index)
{
	virtqueue_set_affinity(vq, cpumask_of(cpumask_local_spread(index % num_online_cpus(), NUMA_NO_NODE)));
}

int vrdma_vq_add(struct virtqueue *vq, void *out, unsigned int out_length, void *in, unsigned int in_length,
		 void *token)
{
	struct scatterlist out_list, in_list, *lists[2];
	unsigned int outs = 0;

	if (out_length) {
		sg_init_one(&out_list, out, out_length);
		lists[outs++] = &out_list;
	}
	sg_init_one(&in_list, in, in_length);
	lists[outs] = &in_list;
	return virtqueue_add_sgs(vq, lists, outs, 1, token, GFP_ATOMIC);
}

/* Finds a vendor capability of virtio (by its configuration type); returns its position or 0. */
static int vrdma_pci_capability(struct pci_dev *pdev, u8 wanted)
{
	int pos;

	for (pos = pci_find_capability(pdev, PCI_CAP_ID_VNDR); pos > 0;
	     pos = pci_find_next_capability(pdev, pos, PCI_CAP_ID_VNDR)) {
		u8 type = 0, bar = 0;

		pci_read_config_byte(pdev, pos + offsetof(struct virtio_pci_cap, cfg_type), &type);
		pci_read_config_byte(pdev, pos + offsetof(struct virtio_pci_cap, bar), &bar);
		if (type == wanted && bar < PCI_STD_NUM_BARS && pci_resource_len(pdev, bar))
			return pos;
	}
	return 0;
}

int vrdma_notify_capability(struct virtio_device *vdev, struct vrdma_notify_capability *found)
{
	struct pci_dev *pdev = vrdma_pci(vdev);
	u32 offset = 0, length = 0, multiplier = 0;
	u8 bar = 0;
	int pos;

	if (!pdev)
		return -ENODEV;
	pos = vrdma_pci_capability(pdev, VIRTIO_PCI_CAP_NOTIFY_CFG);
	if (!pos)
		return -ENODEV;
	pci_read_config_byte(pdev, pos + offsetof(struct virtio_pci_cap, bar), &bar);
	pci_read_config_dword(pdev, pos + offsetof(struct virtio_pci_cap, offset), &offset);
	pci_read_config_dword(pdev, pos + offsetof(struct virtio_pci_cap, length), &length);
	pci_read_config_dword(pdev, pos + offsetof(struct virtio_pci_notify_cap, notify_off_multiplier), &multiplier);
	if ((u64)offset + length > pci_resource_len(pdev, bar))
		return -EINVAL;
	found->start = pci_resource_start(pdev, bar) + offset;
	found->length = length;
	found->multiplier = multiplier;
	return 0;
}

/*
 * The notification offset of every queue. The virtio core keeps what it read to itself, so this
 * reads the common configuration again; only during probe, when nobody else selects queues.
 */
int vrdma_notify_offsets(struct virtio_device *vdev, unsigned int total, u16 *offsets)
{
	struct pci_dev *pdev = vrdma_pci(vdev);
	struct virtio_pci_common_cfg __iomem *common;
	u32 offset = 0;
	unsigned int i;
	u8 bar = 0;
	int pos;

	if (!pdev)
		return -ENODEV;
	pos = vrdma_pci_capability(pdev, VIRTIO_PCI_CAP_COMMON_CFG);
	if (!pos)
		return -ENODEV;
	pci_read_config_byte(pdev, pos + offsetof(struct virtio_pci_cap, bar), &bar);
	pci_read_config_dword(pdev, pos + offsetof(struct virtio_pci_cap, offset), &offset);
	common = pci_iomap_range(pdev, bar, offset, sizeof(*common));
	if (!common)
		return -ENOMEM;
	for (i = 0; i < total; i++) {
		iowrite16(i, &common->queue_select);
		offsets[i] = ioread16(&common->queue_notify_off);
	}
	pci_iounmap(pdev, common);
	return 0;
}

void vrdma_pci_ids(struct virtio_device *vdev, u32 *vendor, u32 *device, u32 *revision)
{
	struct pci_dev *pdev = vrdma_pci(vdev);

	*vendor = pdev ? pdev->vendor : 0;
	*device = pdev ? pdev->device : 0;
	*revision = pdev ? pdev->revision : 0;
}

/* RDMA core. */

/* What the driver adds to the ioctl interface: how to import contexts and device memory. */

ADD_UVERBS_ATTRIBUTES_SIMPLE(vrdma_query_context, UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_CONTEXT,
			     UVERBS_ATTR_PTR_OUT(VRDMA_DRIVER_ATTR, UVERBS_ATTR_MIN_SIZE(8), UA_OPTIONAL));

ADD_UVERBS_ATTRIBUTES_SIMPLE(vrdma_dm_alloc, UVERBS_OBJECT_DM, UVERBS_METHOD_DM_ALLOC,
			     UVERBS_ATTR_PTR_OUT(VRDMA_DRIVER_ATTR, UVERBS_ATTR_MIN_SIZE(8), UA_OPTIONAL));

static int UVERBS_HANDLER(VRDMA_METHOD_DM_QUERY)(struct uverbs_attr_bundle *attrs)
{
	struct ib_dm *dm = uverbs_attr_get_obj(attrs, VRDMA_DRIVER_ATTR);
	struct vrdma_dm_info info = {};

	if (IS_ERR(dm))
		return PTR_ERR(dm);
	vrdma_dm_response(dm, &info);
	return uverbs_copy_to_struct_or_zero(attrs, VRDMA_DM_QUERY_RESPONSE, &info, sizeof(info));
}

DECLARE_UVERBS_NAMED_METHOD(VRDMA_METHOD_DM_QUERY,
			    UVERBS_ATTR_IDR(VRDMA_DRIVER_ATTR, UVERBS_OBJECT_DM, UVERBS_ACCESS_READ, UA_MANDATORY),
			    UVERBS_ATTR_PTR_OUT(VRDMA_DM_QUERY_RESPONSE, UVERBS_ATTR_MIN_SIZE(8), UA_MANDATORY));

ADD_UVERBS_METHODS(vrdma_dm, UVERBS_OBJECT_DM, &UVERBS_METHOD(VRDMA_METHOD_DM_QUERY));

static const struct uapi_definition vrdma_uapi[] = {
	UAPI_DEF_CHAIN_OBJ_TREE(UVERBS_OBJECT_DEVICE, &vrdma_query_context),
	UAPI_DEF_CHAIN_OBJ_TREE(UVERBS_OBJECT_DM, &vrdma_dm_alloc),
	UAPI_DEF_CHAIN_OBJ_TREE(UVERBS_OBJECT_DM, &vrdma_dm),
	{},
};

/* Cut to what user space has room for; what it has more of is cleared. */
int vrdma_attr_write(struct uverbs_attr_bundle *attrs, const void *from, size_t length)
{
	if (!uverbs_attr_is_valid(attrs, VRDMA_DRIVER_ATTR))
		return 0;
	return uverbs_copy_to_struct_or_zero(attrs, VRDMA_DRIVER_ATTR, from, length);
}

int vrdma_details_put(struct sk_buff *msg, const struct vrdma_detail *details, size_t count)
{
	struct nlattr *table = nla_nest_start(msg, RDMA_NLDEV_ATTR_DRIVER);
	size_t i;

	if (!table)
		return -EMSGSIZE;
	for (i = 0; i < count; i++) {
		if (rdma_nl_put_driver_u32(msg, details[i].name, details[i].value)) {
			nla_nest_cancel(msg, table);
			return -EMSGSIZE;
		}
	}
	nla_nest_end(msg, table);
	return 0;
}

/* In the order in which the Rust side gives their values. */
static const struct rdma_stat_desc vrdma_counters[] = {
	{ .name = "tx_bytes" },
	{ .name = "tx_messages" },
	{ .name = "rx_bytes" },
	{ .name = "rx_messages" },
	{ .name = "rnr_naks" },
	{ .name = "retries" },
	{ .name = "errors" },
	{ .name = "out_of_sequence" },
	{ .name = "duplicate_request" },
	{ .name = "out_of_buffer" },
	{ .name = "packet_seq_err" },
	{ .name = "implied_nak_seq_err" },
	{ .name = "local_ack_timeout_err" },
	{ .name = "rnr_nak_retry_err" },
	{ .name = "retrans_pkts" },
	{ .name = "np_ecn_marked_roce_packets" },
	{ .name = "np_cnp_sent" },
	{ .name = "rp_cnp_handled" },
};

struct rdma_hw_stats *vrdma_counters_alloc(void)
{
	return rdma_alloc_hw_stats_struct(vrdma_counters, ARRAY_SIZE(vrdma_counters),
					  RDMA_HW_STATS_DEFAULT_LIFESPAN);
}

int vrdma_counters_set(struct rdma_hw_stats *stats, const u64 *values, size_t count)
{
	size_t i;

	for (i = 0; i < count && i < stats->num_counters; i++)
		stats->value[i] = values[i];
	return i;
}

#ifdef HAVE_QUERY_PORT_SPEED
int vrdma_query_port_speed(struct ib_device *ib, u32 port, u64 *speed)
{
	struct ib_port_speed_info info;
	struct ib_port_attr attr;
	int ret = ib_query_port(ib, port, &attr);

	if (!ret)
		ret = ib_port_attr_to_speed_info(&attr, &info);
	if (!ret)
		*speed = info.rate;
	return ret;
}
#endif

bool vrdma_pma_is_query(const struct ib_mad *in)
{
	return in->mad_hdr.mgmt_class == IB_MGMT_CLASS_PERF_MGMT &&
	       in->mad_hdr.method == IB_MGMT_METHOD_GET;
}

static u32 vrdma_pma_clamp(u64 value)
{
	return min_t(u64, value, U32_MAX);
}

/* Data are counted in words of four bytes there, and what is a message here is called a packet. */
void vrdma_pma_answer(const struct ib_mad *in, struct ib_mad *out, const u64 *values)
{
	enum { TX_BYTES, TX_MESSAGES, RX_BYTES, RX_MESSAGES };
	struct ib_pma_mad *answer = (struct ib_pma_mad *)out;
	struct ib_class_port_info *info = (void *)answer->data;
	struct ib_pma_portcounters *counters = (void *)answer->data;
	struct ib_pma_portcounters_ext *wide = (void *)answer->data;

	memset(out, 0, sizeof(*out));
	out->mad_hdr = in->mad_hdr;
	out->mad_hdr.method = IB_MGMT_METHOD_GET_RESP;
	out->mad_hdr.status = 0;
	switch (in->mad_hdr.attr_id) {
	case IB_PMA_CLASS_PORT_INFO:
		info->base_version = IB_MGMT_BASE_VERSION;
		info->class_version = 1;
		info->capability_mask = IB_PMA_CLASS_CAP_EXT_WIDTH_NOIETF;
		break;
	case IB_PMA_PORT_COUNTERS:
		counters->port_select = 1;
		counters->port_xmit_data = cpu_to_be32(vrdma_pma_clamp(values[TX_BYTES] / 4));
		counters->port_rcv_data = cpu_to_be32(vrdma_pma_clamp(values[RX_BYTES] / 4));
		counters->port_xmit_packets = cpu_to_be32(vrdma_pma_clamp(values[TX_MESSAGES]));
		counters->port_rcv_packets = cpu_to_be32(vrdma_pma_clamp(values[RX_MESSAGES]));
		break;
	case IB_PMA_PORT_COUNTERS_EXT:
		wide->port_select = 1;
		wide->port_xmit_data = cpu_to_be64(values[TX_BYTES] / 4);
		wide->port_rcv_data = cpu_to_be64(values[RX_BYTES] / 4);
		wide->port_xmit_packets = cpu_to_be64(values[TX_MESSAGES]);
		wide->port_rcv_packets = cpu_to_be64(values[RX_MESSAGES]);
		break;
	default:
		out->mad_hdr.status = cpu_to_be16(IB_MGMT_MAD_STATUS_UNSUPPORTED_METHOD_ATTRIB);
	}
}

struct ib_device *vrdma_ib_alloc(size_t size, struct device *parent)
{
	struct ib_device *ib;

#ifdef HAVE_IB_ALLOC_DEVICE_NET
	ib = _ib_alloc_device(size, &init_net);
#else
	ib = _ib_alloc_device(size);
#endif
	if (ib) {
		ib->dev.parent = parent;
		ib->driver_def = vrdma_uapi;
	}
	return ib;
}

struct ib_ucontext *vrdma_udata_context(struct ib_udata *udata)
{
	return rdma_udata_to_uverbs_attr_bundle(udata)->context;
}

struct ib_udata *vrdma_attrs_udata(struct uverbs_attr_bundle *attrs)
{
	return attrs ? &attrs->driver_udata : NULL;
}

/* Missing bytes count as zero; bytes that we do not know must be zero. */
int vrdma_udata_read(struct ib_udata *udata, void *to, size_t length)
{
	memset(to, 0, length);
	if (!udata || !udata->inlen)
		return 0;
	if (length && ib_copy_from_udata(to, udata, min(length, udata->inlen)))
		return -EFAULT;
	if (udata->inlen > length && !ib_is_udata_cleared(udata, length, udata->inlen - length))
		return -EOPNOTSUPP;
	return 0;
}

/* Cut to what user space has room for; what it has more of is cleared. */
int vrdma_udata_write(struct ib_udata *udata, const void *from, size_t length)
{
	size_t fits;

	if (!udata || !udata->outlen)
		return 0;
	fits = min(length, udata->outlen);
	if (fits && copy_to_user(udata->outbuf, from, fits))
		return -EFAULT;
	if (udata->outlen > fits && clear_user(udata->outbuf + fits, udata->outlen - fits))
		return -EFAULT;
	return 0;
}

void vrdma_cq_cancel_polling(struct ib_cq *cq)
{
	if (cq->poll_ctx == IB_POLL_WORKQUEUE || cq->poll_ctx == IB_POLL_UNBOUND_WORKQUEUE)
		cancel_work_sync(&cq->work);
}

struct ib_umem *vrdma_umem_get(struct ib_device *ib, u64 addr, size_t length, int access)
{
#ifdef HAVE_IB_UMEM_GET_VA
	return ib_umem_get_va(ib, addr, length, access);
#else
	return ib_umem_get(ib, addr, length, access);
#endif
}

struct ib_umem *vrdma_umem_get_cq(struct ib_device *ib, struct uverbs_attr_bundle *attrs, u64 addr, size_t length,
				  int access)
{
#ifdef HAVE_IB_UMEM_GET_CQ_BUF_OR_VA
	return ib_umem_get_cq_buf_or_va(ib, attrs, addr, length, access);
#else
	return vrdma_umem_get(ib, addr, length, access);
#endif
}

size_t vrdma_umem_blocks(struct ib_umem *umem, unsigned long block)
{
	return ib_umem_num_dma_blocks(umem, block);
}

int vrdma_umem_for_each(struct ib_umem *umem, unsigned long block, int (*each)(void *arg, u64 addr), void *arg)
{
	struct ib_block_iter iter;
	int ret;

	rdma_umem_for_each_dma_block(umem, &iter, block) {
		ret = each(arg, rdma_block_iter_dma_address(&iter));
		if (ret)
			return ret;
	}
	return 0;
}

/* Of a list that is mapped; until `each` says no. */
void vrdma_sg_for_each(struct scatterlist *sg, int count, bool (*each)(void *arg, u64 addr, u32 length), void *arg)
{
	for (; count > 0 && sg; count--, sg = sg_next(sg))
		if (!each(arg, sg_dma_address(sg), sg_dma_len(sg)))
			return;
}

/*
 * Every page of the mapping holds a reference: it stays valid memory even when the driver has gone.
 */
int vrdma_mmap_pages(struct vm_area_struct *vma, void *const *pages, size_t count, bool read_only)
{
	size_t i;
	int ret;

	if (vma_pages(vma) != count)
		return -EINVAL;
	if (read_only) {
		if (vma->vm_flags & VM_WRITE)
			return -EPERM;
		vm_flags_clear(vma, VM_MAYWRITE);
	}
	vm_flags_set(vma, VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP);
	for (i = 0; i < count; i++) {
		ret = vm_insert_page(vma, vma->vm_start + i * PAGE_SIZE, virt_to_page(pages[i]));
		if (ret)
			return ret;
	}
	return 0;
}

int vrdma_mmap_io(struct ib_ucontext *context, struct vm_area_struct *vma, u64 addr, size_t length,
		  struct rdma_user_mmap_entry *entry)
{
	return rdma_user_mmap_io(context, vma, addr >> PAGE_SHIFT, length, pgprot_noncached(vma->vm_page_prot), entry);
}

/* Network interfaces. */

struct vrdma_netdev_watch {
	struct notifier_block notifier;
	void (*event)(void *arg, struct net_device *ndev, bool going);
	void *arg;
	bool started;
};

static int vrdma_netdev_event(struct notifier_block *notifier, unsigned long event, void *info)
{
	struct vrdma_netdev_watch *watch = container_of(notifier, struct vrdma_netdev_watch, notifier);

	watch->event(watch->arg, netdev_notifier_info_to_dev(info), event == NETDEV_UNREGISTER);
	return NOTIFY_DONE;
}

struct vrdma_netdev_watch *vrdma_netdev_watch_new(void (*event)(void *arg, struct net_device *ndev, bool going),
						  void *arg)
{
	struct vrdma_netdev_watch *watch = kzalloc(sizeof(*watch), GFP_KERNEL);

	if (watch) {
		watch->notifier.notifier_call = vrdma_netdev_event;
		watch->event = event;
		watch->arg = arg;
	}
	return watch;
}

int vrdma_netdev_watch_start(struct vrdma_netdev_watch *watch)
{
	int ret = register_netdevice_notifier(&watch->notifier);

	watch->started = !ret;
	return ret;
}

void vrdma_netdev_watch_stop(struct vrdma_netdev_watch *watch)
{
	if (watch->started)
		unregister_netdevice_notifier(&watch->notifier);
	watch->started = false;
}

/*
 * The interface with this MAC address or, if it is zero, the first with any. Only those with
 * hardware (be it virtual) behind them: a VLAN, bridge or bond on top has the same address.
 */
struct net_device *vrdma_netdev_find(const u8 *mac)
{
	struct net_device *ndev;

	ASSERT_RTNL();
	for_each_netdev(&init_net, ndev) {
		if (ndev->type != ARPHRD_ETHER || !ndev->dev.parent || ndev->reg_state != NETREG_REGISTERED)
			continue;
		if (is_zero_ether_addr(mac) ? is_valid_ether_addr(ndev->dev_addr) :
		    ether_addr_equal(ndev->dev_addr, mac) || ether_addr_equal(ndev->perm_addr, mac))
			return ndev;
	}
	return NULL;
}

bool vrdma_netdev_is_up(struct ib_device *ib)
{
	struct net_device *ndev = ib_device_get_netdev(ib, 1);
	bool up;

	if (!ndev)
		return false;
	up = netif_running(ndev) && netif_carrier_ok(ndev);
	dev_put(ndev);
	return up;
}

/* Deletes the GIDs of all interfaces: nobody finds the device by an address any more. */
void vrdma_delete_gids(struct ib_device *ib)
{
	int i;

	for (i = 0; i < ib->port_data[1].immutable.gid_tbl_len; i++) {
		const struct ib_gid_attr *attr = rdma_get_gid_attr(ib, 1, i);
		struct net_device *ndev;

		if (IS_ERR(attr))
			continue;
		rcu_read_lock();
		ndev = rdma_read_gid_attr_ndev_rcu(attr);
		if (IS_ERR(ndev))
			ndev = NULL;
		dev_hold(ndev);
		rcu_read_unlock();
		rdma_put_gid_attr(attr);
		if (ndev)
			roce_del_all_netdev_gids(ib, 1, ndev);
		dev_put(ndev);
	}
}

bool vrdma_netdev_mac(struct ib_device *ib, u8 *mac)
{
	struct net_device *ndev = ib_device_get_netdev(ib, 1);

	if (!ndev)
		return false;
	ether_addr_copy(mac, ndev->dev_addr);
	dev_put(ndev);
	return true;
}

/* Connections of iWARP. */

/* Before the device is registered; the port is paired. The ports of TCP are those that users ask for. */
void vrdma_iwarp_setup(struct ib_device *ib)
{
	struct net_device *ndev = ib_device_get_netdev(ib, 1);

	ib->iw_driver_flags = IW_F_NO_PORT_MAP;
	if (ndev)
		strscpy(ib->iw_ifname, ndev->name, sizeof(ib->iw_ifname));
	dev_put(ndev);
}

bool vrdma_address_get(const struct sockaddr_storage *from, u8 *addr, u16 *port)
{
	const struct sockaddr_in *v4 = (const struct sockaddr_in *)from;
	const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)from;
	struct in6_addr ip;

	switch (from->ss_family) {
	case AF_INET:
		ipv6_addr_set_v4mapped(v4->sin_addr.s_addr, &ip);
		*port = ntohs(v4->sin_port);
		break;
	case AF_INET6:
		ip = v6->sin6_addr;
		*port = ntohs(v6->sin6_port);
		break;
	default:
		return false;
	}
	memcpy(addr, &ip, sizeof(ip));
	return true;
}

void vrdma_address_set(struct ib_device *ib, struct sockaddr_storage *to, const u8 *addr, u16 port)
{
	struct sockaddr_in *v4 = (struct sockaddr_in *)to;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)to;
	struct net_device *ndev;
	struct in6_addr ip;

	memset(to, 0, sizeof(*to));
	memcpy(&ip, addr, sizeof(ip));
	if (ipv6_addr_v4mapped(&ip)) {
		v4->sin_family = AF_INET;
		v4->sin_addr.s_addr = ip.s6_addr32[3];
		v4->sin_port = htons(port);
		return;
	}
	v6->sin6_family = AF_INET6;
	v6->sin6_addr = ip;
	v6->sin6_port = htons(port);
	if (ipv6_addr_type(&ip) & IPV6_ADDR_LINKLOCAL) {
		ndev = ib_device_get_netdev(ib, 1);
		if (ndev)
			v6->sin6_scope_id = ndev->ifindex;
		dev_put(ndev);
	}
}

/* Under RCU. */
static bool vrdma_local_v4(struct net_device *ndev, struct in6_addr *local)
{
	struct in_device *in_dev = __in_dev_get_rcu(ndev);
	const struct in_ifaddr *ifa;
	__be32 first = 0;

	if (!in_dev)
		return false;
	in_dev_for_each_ifa_rcu(ifa, in_dev) {
		if (ifa->ifa_local == local->s6_addr32[3])
			return true;
		if (!first)
			first = ifa->ifa_local;
	}
	ipv6_addr_set_v4mapped(first, local);
	return first;
}

/* Under RCU. Of the addresses one with the scope of `remote`. */
static bool vrdma_local_v6(struct net_device *ndev, const struct in6_addr *remote, struct in6_addr *local)
{
	struct inet6_dev *in6_dev = __in6_dev_get(ndev);
	bool link_local = ipv6_addr_type(remote) & IPV6_ADDR_LINKLOCAL;
	const struct inet6_ifaddr *ifa;
	struct in6_addr found = {};

	if (!in6_dev)
		return false;
	read_lock_bh(&in6_dev->lock);
	list_for_each_entry(ifa, &in6_dev->addr_list, if_list) {
		if (ifa->flags & IFA_F_TENTATIVE)
			continue;
		if (ipv6_addr_equal(&ifa->addr, local)) {
			found = ifa->addr;
			break;
		}
		if (ipv6_addr_any(&found) && !!(ipv6_addr_type(&ifa->addr) & IPV6_ADDR_LINKLOCAL) == link_local)
			found = ifa->addr;
	}
	read_unlock_bh(&in6_dev->lock);
	*local = found;
	return !ipv6_addr_any(&found);
}

bool vrdma_local_address(struct ib_device *ib, const u8 *remote, u8 *local)
{
	struct net_device *ndev = ib_device_get_netdev(ib, 1);
	struct in6_addr to, from;
	bool found;

	if (!ndev)
		return false;
	memcpy(&from, remote, sizeof(from));
	memcpy(&to, local, sizeof(to));
	rcu_read_lock();
	found = ipv6_addr_v4mapped(&from) ? vrdma_local_v4(ndev, &to) : vrdma_local_v6(ndev, &from, &to);
	rcu_read_unlock();
	dev_put(ndev);
	memcpy(local, &to, sizeof(to));
	return found;
}
