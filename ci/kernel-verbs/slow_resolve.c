// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
/*
 * Makes users in the kernel slow to connect: each sleeps for some time (parameter ms) between its peer's address being
 * resolved and the route. A device that is taken away in that time is one that rdma_cm has bound the connection to,
 * and the user gets EINVAL.
 */
#include <linux/delay.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/string.h>

#include <rdma/rdma_cm.h>

static unsigned int ms = 500;
module_param(ms, uint, 0444);
MODULE_PARM_DESC(ms, "for how long they sleep, milliseconds");

static unsigned int slept;
module_param(slept, uint, 0444);
MODULE_PARM_DESC(slept, "how often that was");

/* Who has slept, and calls the function now. */
static struct task_struct *awake;

static int slowly(struct rdma_cm_id *id, unsigned long timeout_ms)
{
	msleep(ms);
	slept++;
	WRITE_ONCE(awake, current);
	return rdma_resolve_route(id, timeout_ms);
}

static int instead(struct kprobe *probe, struct pt_regs *regs)
{
	/* Users in the kernel connect from work items. */
	if (!strstarts(current->comm, "kworker"))
		return 0;
	if (READ_ONCE(awake) == current) {
		WRITE_ONCE(awake, NULL);
		return 0;
	}
	instruction_pointer_set(regs, (unsigned long)slowly);
	return 1;
}

static struct kprobe probe = {
	.symbol_name = "rdma_resolve_route",
	.pre_handler = instead,
};

static int __init slow_resolve_init(void)
{
	return register_kprobe(&probe);
}

static void __exit slow_resolve_exit(void)
{
	unregister_kprobe(&probe);
	/* Until nobody sleeps any longer. */
	msleep(2 * ms);
}

module_init(slow_resolve_init);
module_exit(slow_resolve_exit);

MODULE_DESCRIPTION("Makes users of rdma_cm in the kernel slow to connect");
MODULE_LICENSE("GPL");
